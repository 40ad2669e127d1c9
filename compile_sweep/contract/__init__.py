"""What a workload is: the interface that a user implements, and the inspection of a model."""
