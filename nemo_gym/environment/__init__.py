"""The implementation of `SimpleResourcesServer`: rows and their public part, attempts, verdicts, boxes and routes."""
