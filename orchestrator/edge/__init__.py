"""Where clients come in: who they are and what that allows. Knows no session and no model."""
