"""Code that `anydepth export` copies into a folder for transformers; the package itself never imports it."""
