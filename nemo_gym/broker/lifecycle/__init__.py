"""The life of a box: intent, backend, confirmation; and what makes good for everything that went wrong between."""
