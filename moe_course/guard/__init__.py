"""Guards around a run: what ranks must agree on, what they hold, what one known pass must give, who is stuck."""
