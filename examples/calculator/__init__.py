"""The quickstart's task with a tool: apply f(x) = x + b mod 1000 n times, by calling Python or in the head."""
