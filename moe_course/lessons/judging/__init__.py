"""How an answer to an exercise is judged: rebuilt from its text, tried on cases, compared, and told what is wrong."""
