"""What the demo asks: short and fixed. The second answer copies from its prompt, as edits of text and code do."""

DEMO_PROMPTS = (
    "Explain in a few sentences why the sky is blue during the day and red at sunset.",
    "Fix the spelling of this text and give it back whole: "
    '"The verifier holds the target modell. It alone decides tokens, and a drafter only guesses them. A guess is '
    "checked at evry position, and what the target would not have written is thrown away. So a good drafter makes the "
    "answer come sooner, a bad one makes it come no later than before, and neither of them can change a single tokken "
    'of it."',
    "List the planets of the solar system in order of their distance from the sun, one per line, each with one fact.",
)
