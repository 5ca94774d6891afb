"""Rights to boxes: tokens, what each may do, and how many boxes each owner may have."""
