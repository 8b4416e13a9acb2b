"""What expert parallelism costs: memory of a plan, rows and bytes of a routing, FLOPs; counted and as a bound."""
