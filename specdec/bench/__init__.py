"""Measures what speculation brings, through the whole path and beside other programs. Knows clients, prompts and
figures; starts no role, decides no token, and imports no service; torch only in the process that runs the others."""
