"""The HTTP layer of every server: the application, its client, credentials, problems."""
