"""The command line. Knows how to start roles and to talk to them; imports no role statically, decides no token."""
