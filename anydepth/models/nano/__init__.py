"""The embedded model: its questions, its vocabulary and its weights."""
