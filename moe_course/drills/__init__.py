"""Fire drills: the eight ways an expert-parallel run breaks, each for real, each with its diagnosis."""
