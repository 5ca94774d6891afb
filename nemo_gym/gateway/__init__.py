"""The only way to the policy model: sessions per attempt, wire dialects, usage."""
