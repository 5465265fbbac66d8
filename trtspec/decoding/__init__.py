"""The decoding core: distributions, verification, drafters, stop and length rules, and the cycle that joins them.

numpy only, and only relative imports: the folder is copied as it is into generated Triton repositories.
It does not know torch, Triton, YAML, Hugging Face or how an engine is run. Begin reading at `cycle.generate`.
"""
