"""What a person sees in the terminal before, during and after a sweep."""
