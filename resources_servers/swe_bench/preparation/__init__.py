"""The parts of ``ng_prepare swe_bench``, which turns rows and local repositories into images that boxes start from."""
