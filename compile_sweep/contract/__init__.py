"""What a workload is: the interface a user implements, and what can be found out from a model."""
