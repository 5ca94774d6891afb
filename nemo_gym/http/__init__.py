"""What every server shares on the wire: the application, its client, credentials, problems."""
