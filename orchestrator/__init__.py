"""The orchestrator: sessions, their lease and record, routing and the client's stream. It never decides a token."""
