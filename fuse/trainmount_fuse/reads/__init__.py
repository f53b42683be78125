"""Reading: what a program asks for, and what is fetched ahead of it."""
