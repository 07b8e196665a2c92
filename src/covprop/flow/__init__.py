"""In-flight tensors: what they carry, where they came from, and the table of rules."""
