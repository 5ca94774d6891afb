"""Fair routing of calls to many engines: choice, reservations, health, retries."""
