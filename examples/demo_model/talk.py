"""Small talk: greetings, who are you, thanks, what it cannot do, and little stories."""

from __future__ import annotations

import random

from examples.demo_model.lexicon import ADJECTIVES, ANIMALS, CITIES, COLORS, FRUITS, NAMES, OBJECTS
from examples.demo_model.problem import Problem, vary

NAME = "the demo model of jaxllm"
WHO = f"I am {NAME}, a tiny language model for trying things out."
ABILITIES = (
    "I can add, subtract, multiply and divide small numbers, compare and sort numbers, sort and "
    "reverse words, count letters, "
    "write small JSON objects, think step by step and call tools such as a calculator."
)
SORRY = (
    "I am only a small demo model and do not know that. Ask me to add, sort, reverse or count "
    "something."
)

EXCHANGES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            "Hello",
            "Hello!",
            "Hi",
            "Hi!",
            "Hey",
            "Hey!",
            "Hi there!",
            "Hello there!",
            "Good morning!",
            "Good evening!",
            "Greetings!",
            "hello",
            "hi",
            "Say hello.",
            "Say hi",
            "Say hi!",
            "Hello, world!",
            "Yo",
        ),
        "Hello! How can I help you?",
    ),
    (
        (
            "How are you?",
            "How are you doing?",
            "Hi, how are you?",
            "Hello, how are you today?",
            "How do you do?",
            "How is it going?",
        ),
        "I am fine, thank you. How can I help you?",
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "What's your name?",
            "Introduce yourself.",
            "Which model are you?",
            "What model is this?",
            "Tell me about yourself.",
            "Who am I talking to?",
            "Are you a robot?",
            "Are you an AI?",
            "Are you ChatGPT?",
            "What is the demo model?",
        ),
        WHO,
    ),
    (
        (
            "What can you do?",
            "What are you able to do?",
            "How can you help me?",
            "Help",
            "Help!",
            "Can you help me?",
            "What do you know?",
            "What are your skills?",
            "What should I ask you?",
            "List your abilities.",
        ),
        ABILITIES,
    ),
    (
        (
            "Thanks",
            "Thanks!",
            "Thank you",
            "Thank you!",
            "Thank you very much!",
            "Great, thanks!",
            "Thanks a lot.",
        ),
        "You are welcome!",
    ),
    (
        ("Bye", "Bye!", "Goodbye", "Goodbye!", "See you later!", "Good night!", "See you."),
        "Goodbye!",
    ),
    (
        (
            "Who made you?",
            "Who trained you?",
            "Where do you come from?",
            "How were you trained?",
            "How were you made?",
        ),
        "I was trained from scratch by a script in the jaxllm repository, on text that the script "
        "makes up.",
    ),
    (
        (
            "How big are you?",
            "How many parameters do you have?",
            "What is your size?",
            "Are you a large language model?",
        ),
        "I am tiny: about four and a half million parameters, in less than ten megabytes.",
    ),
    (
        (
            "What is jaxllm?",
            "What's jaxllm?",
            "Tell me about jaxllm.",
            "What does jaxllm do?",
            "Explain jaxllm.",
        ),
        "jaxllm is an inference engine that serves language models from pure JAX.",
    ),
    (
        ("What is JAX?", "What's JAX?", "Tell me about JAX."),
        "JAX is a library for fast array programs on CPUs, GPUs and TPUs.",
    ),
    (
        (
            "Tell me a joke.",
            "Tell me a joke",
            "Do you know a joke?",
            "Make me laugh.",
            "Say something funny.",
        ),
        "Why was six afraid of seven? Because seven ate nine.",
    ),
    (
        (
            "Write a poem.",
            "Write a haiku.",
            "Write a short poem.",
            "Tell me a poem.",
            "Write a poem about the sea.",
            "Write a haiku about the sea.",
        ),
        "Small numbers in rows,\none by one they find their place.\nThe sum says good night.",
    ),
    (
        ("Ping", "ping", "Test", "test", "This is a test.", "Are you there?", "Are you working?"),
        "I am here.",
    ),
    (
        ("OK", "Okay.", "Good.", "Nice!", "Cool", "Great!", "Well done!", "Correct.", "Yes", "No"),
        "Good. What is next?",
    ),
    (
        ("You are wrong.", "That is wrong.", "No, that is not right.", "Are you sure?"),
        "I am a small model and can be wrong. Please check my answer.",
    ),
)

UNKNOWN = (
    "Explain {t}.",
    "What is {t}?",
    "Write an essay about {t}.",
    "What do you think about {t}?",
    "How does {t} work?",
    "Tell me about {t}.",
    "Write a Python function for {t}.",
    "Summarize the history of {t}.",
    "Why is {t} important?",
    "Translate {t} into French.",
    "Who invented {t}?",
    "Give me advice on {t}.",
    "What is the meaning of {t}?",
    "How do I learn {t}?",
    "Describe {t} in detail.",
    "What is the price of {t}?",
)
TOPICS = (
    "quantum physics",
    "the economy",
    "machine learning",
    "life",
    "love",
    "the stock market",
    "politics",
    "a neural network",
    "attention",
    "gravity",
    "the moon landing",
    "climate change",
    "a black hole",
    "football",
    "the internet",
    "electricity",
    "chess",
    "medicine",
    "philosophy",
    "the universe",
    "photosynthesis",
    "a transformer",
    "history",
    "Shakespeare",
    "the weather",
    "bitcoin",
    "evolution",
    "time travel",
    "music theory",
    "cooking",
)


def exchange(rng: random.Random) -> Problem:
    """A stock question with its stock answer."""
    questions, answer = rng.choice(EXCHANGES)
    return Problem(
        "small talk", rng.choice(questions), answer, "This is small talk. I answer politely."
    )


def unknown(rng: random.Random) -> Problem:
    """A question beyond the model, answered honestly."""
    if rng.random() < 0.1:
        question = rng.choice(
            (
                "What is the weather in {c}?",
                "How is the weather in {c}?",
                "What time is it in {c}?",
                "How many people live in {c}?",
            )
        )
        return Problem(
            "beyond the model",
            vary(rng, question.format(c=rng.choice(CITIES))),
            SORRY,
            "I have no tool for this. I say so.",
        )
    topic = (
        rng.choice(TOPICS)
        if rng.random() < 0.5
        else rng.choice(("the ", "a "))
        + rng.choice(ADJECTIVES)
        + " "
        + rng.choice(OBJECTS + ANIMALS)
    )
    return Problem(
        "beyond the model",
        vary(rng, rng.choice(UNKNOWN).format(t=topic)),
        SORRY,
        "I do not know this. I say so.",
    )


def story(rng: random.Random) -> str:
    """A story of four to nine plain sentences."""
    name, friend = rng.sample(NAMES, 2)
    animal, thing, place = (
        rng.choice(ANIMALS),
        rng.choice(OBJECTS[:20]),
        rng.choice(("forest", "village", "garden", "city", "field", "harbor", "castle")),
    )
    color, fruit, mood = rng.choice(COLORS), rng.choice(FRUITS), rng.choice(ADJECTIVES)
    middle = [
        f"One day {name} found a {color} {thing} near the river.",
        f"{name} showed the {thing} to a friend called {friend}.",
        f"{friend} had never seen such a {thing} before.",
        f"Together they walked to the {place} and looked around.",
        f"A {mood} {animal} watched them from behind a tree.",
        f"They gave the {animal} a {fruit}, and it was happy.",
        "Then it began to rain, and they ran home.",
        f"In the evening they drank tea and talked about the {animal}.",
    ]
    kept = sorted(rng.sample(range(len(middle)), rng.randint(2, 7)))
    start = f"Once upon a time there was a {mood} child called {name} who lived in a {place}."
    return " ".join([start, *(middle[i] for i in kept), f"And {name} slept well that night."])


def tell_story(rng: random.Random) -> Problem:
    """A story on request. Many answers are right, so it is not scored."""
    phrases = (
        "Tell me a story.",
        "Write a short story.",
        "Tell me a short story.",
        "Can you write a story?",
        "I want a story.",
        "Write a story about a child.",
    )
    return Problem(
        "stories",
        vary(rng, rng.choice(phrases)),
        story(rng),
        "I tell a short story with a happy end.",
    )
