"""Contexts that serve many questions, of several tasks, at nested lengths: the shared protocol."""
