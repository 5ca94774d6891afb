"""Commands in boxes: each submission runs once, and its output can be read from any place until it is dropped."""
