"""What a plan costs before anything runs: memory of the MoE part, per rank."""
