"""The inference engine: requests, scheduling, the step pipeline, and the collection of results."""
