"""The quickstart's task: apply f(x) = x∘b mod 10 n times, written out step by step."""
