"""What the demo asks: short, fixed, and the second one's answer copies from its prompt."""

DEMO_PROMPTS = (
    "Explain in a few sentences why the sky is blue during the day and red at sunset.",
    """Add a docstring to this function and repeat the whole function:

```python
def moving_average(values, window_size):
    averages = []
    for start in range(len(values) - window_size + 1):
        window = values[start : start + window_size]
        averages.append(sum(window) / window_size)
    return averages
```""",
    "List the planets of the solar system in order of their distance from the sun, one per line, each with one fact.",
)
