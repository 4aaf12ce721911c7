"""The table of tools that conversations offer."""

from __future__ import annotations

from collections.abc import Callable

from examples.demo_model.lexicon import CITIES, COLORS, FRUITS, OBJECTS
from examples.demo_model.problem import pair_held_out
from examples.demo_model.skills import values
from examples.demo_model.skills.kinds import (
    Kind,
    Parameter,
    always,
    cells,
    choice,
    drawn,
    integer,
    kind,
    text,
)
from examples.demo_model.skills.values import one_of
from examples.demo_model.toolbox import WEATHER


def binary(operation: str, names: str, asks: str, value: Callable[[int, int], int]) -> Kind:
    """A tool of two numbers."""
    numbers = (integer("a|x|first", 0, 999), integer("b|y|second", 0, 999))
    if operation == "multiply":
        numbers = (integer("a|x|first", 2, 199), integer("b|y|second", 2, 99))
    result = lambda rng, arguments: value(*arguments)
    abouts = cells(f"{operation.capitalize()} two numbers.|{operation.capitalize()}|Arithmetic")
    held = lambda arguments: pair_held_out(operation, *arguments)
    return Kind(cells(names), abouts, numbers, cells(asks), result, "result", "{r}", split=held)


city = text("city|location|place", one_of(CITIES), "The city|City name|Name of the city")
SUMS = (
    binary(
        "add",
        "add|add_numbers|plus|sum_two",
        "What is {0} + {1}?|Add {0} and {1}.|{0} + {1}|What is {0} plus {1}?|Compute {0} + {1}.",
        lambda a, b: a + b,
    ),
    binary(
        "multiply",
        "multiply|mul|times|multiply_numbers",
        "What is {0} * {1}?|Multiply {0} by {1}.|{0} * {1}|What is {0} times {1}?|"
        "Calculate {0} * {1}.",
        lambda a, b: a * b,
    ),
    binary(
        "subtract",
        "subtract|minus|sub",
        "What is {0} - {1}?|Compute {0} - {1}.|{0} - {1}|What is {0} minus {1}?",
        lambda a, b: a - b,
    ),
)
FINDS = (
    kind(
        "get_weather|weather|get_current_weather",
        "Get the weather.|Get the current weather in a city.|The weather of a place.",
        (city, choice("unit|units", ("celsius", "fahrenheit"), " in {}")),
        "What is the weather in {0s}?|What's the weather like in {0s}?|Weather in {0s}?|"
        "How is the weather in {0s}?",
        lambda rng, _: f"{rng.randint(-10, 40)} degrees and {rng.choice(WEATHER)}",
        "weather",
        "In {0} it is {r}.",
    ),
    kind(
        "get_time|get_current_time|clock|time_in",
        "Get the time in a city.|The current time of a place|World clock",
        city,
        "What time is it in {0s}?|Tell me the time in {0s}.|Time in {0s}?|What's the time in {0s}?",
        drawn(values.clock),
        "time",
        "It is {r} in {0}.",
    ),
    kind(
        "get_population|population",
        "Get the population of a city.|How many people live in a place",
        city,
        "How many people live in {0s}?|What is the population of {0s}?|Population of {0s}?",
        drawn(values.number(1000, 999999)),
        "population",
        "{r} people live in {0}.",
    ),
    kind(
        "get_stock_price|stock_price|quote",
        "Get the price of a share.|Stock quote",
        text("symbol|ticker", values.symbol, "Symbol of the share"),
        "What is the stock price of {0s}?|Stock price of {0s}?|How much is a share of {0s}?",
        drawn(values.decimal),
        "price",
        "A share of {0} costs {r}.",
    ),
    kind(
        "get_order|order_status|track_order",
        "Get the state of an order.|Track an order by its number",
        text("order_id|id|order", values.code, "Number of the order"),
        "Where is my order {0s}?|What is the status of order {0s}?|Track order {0s}.",
        drawn(one_of(("shipped", "delivered", "lost", "packed", "paid", "late"))),
        "status",
        "Order {0} is {r}.",
    ),
    kind(
        "find_email|get_email|lookup_contact",
        "Find the mail address of a person.|Search the contacts",
        text("name|person|contact", values.person, "The person's name"),
        "What is the email of {0s}?|Find the mail address of {0s}.|Email of {0s}?",
        drawn(values.email),
        "email",
        "The email of {0} is {r}.",
    ),
    kind(
        "get_price|price_of|check_price",
        "Get the price of a thing in a shop.|Price of an item",
        (text("item|product|thing", values.title), choice("currency", values.CURRENCIES, " in {}")),
        "How much does the {0} cost?|What is the price of the {0}?|Price of the {0}?",
        drawn(values.number(1, 999)),
        "price",
        "The {0} costs {r}.",
    ),
    kind(
        "read_file|open_file|cat_file",
        "Read a file.|Get the content of a file",
        text("path|file|filename", values.path, "Path of the file"),
        "What is in {0s}?|Read {0s}.|Show me {0s}.|Open the file {0s}.",
        drawn(values.title),
        "content",
        "{0} says: {r}",
    ),
    kind(
        "search|web_search|search_web",
        "Search the web.|Find pages on the internet",
        (
            text("query|q", values.title, "What to search for"),
            integer("limit|max_results", 1, 20, "How many results", " Give me {} results."),
        ),
        "Search for {0}.|Search the web for {0}.|Look up {0} on the web.|Find pages about {0}.",
        drawn(values.title),
        "result",
        "I found this: {r}.",
    ),
    kind(
        "translate|translate_word",
        "Translate a word.|Translate text into a language",
        (text("text|word", one_of(OBJECTS)), choice("language|to|target", values.LANGUAGES)),
        "Translate {0} into {1}.|What is {0} in {1}?|How do you say {0} in {1}?",
        drawn(values.invented),
        "translation",
        "It means {r}.",
    ),
    kind(
        "convert_currency|convert_money|exchange",
        "Convert an amount of money.|Exchange rates",
        (
            integer("amount|value", 1, 9999),
            choice("from_currency|source|from", values.CURRENCIES),
            choice("to_currency|target|to", values.CURRENCIES),
        ),
        "Convert {0} {1} to {2}.|How much is {0} {1} in {2}?|What are {0} {1} in {2}?",
        drawn(values.decimal),
        "amount",
        "That is {r}.",
    ),
    kind(
        "convert_units|convert",
        "Convert a length or a weight.|Unit converter",
        (
            Parameter(cells("value|amount|number"), "number", values.decimal),
            text("from_unit|unit", one_of(values.UNITS)),
            text("to_unit|target_unit", one_of(values.UNITS)),
        ),
        "How many {2} are {0} {1}?|Convert {0} {1} to {2}.|What are {0} {1} in {2}?",
        drawn(values.decimal),
        "value",
        "That is {r}.",
    ),
    kind(
        "get_distance|distance",
        "Get the distance of two cities in km.|How far two places are apart",
        (text("start|origin|from_city", one_of(CITIES)), text("end|to_city|goal", one_of(CITIES))),
        "How far is it from {0} to {1}?|What is the distance from {0} to {1}?",
        drawn(values.number(20, 9999)),
        "km",
        "It is {r} km from {0} to {1}.",
    ),
    kind(
        "random_number|roll|pick_number",
        "Draw a random number.|Random integer of a range",
        (integer("low|min|start", 0, 99), integer("high|max|end", 100, 999)),
        "Pick a random number from {0} to {1}.|Give me a random number between {0} and {1}.",
        lambda rng, arguments: rng.randint(*arguments),
        "number",
        "The number is {r}.",
    ),
    kind(
        "sum_numbers|sum_list|total",
        "Add up a list of numbers.|Sum of a list",
        Parameter(cells("numbers|values|list"), "array", values.numbers_of(5, 8)),
        "Add up these numbers: {0}|What is the total of {0}?|Sum up {0}.",
        lambda rng, arguments: sum(arguments[0]),
        "sum",
        "{r}",
    ),
)
DOES = (
    kind(
        "send_email|send_mail|mail",
        "Send a mail.|Write an email to somebody",
        (
            text("to|recipient|address", values.email, "The receiver's address"),
            text("subject|title", values.title),
            text("body|message|text", values.title),
        ),
        "Send an email to {0} with the subject {1} and the text {2}.|"
        "Write to {0}, subject {1}, text {2}.",
        always("sent"),
        "status",
        "The mail to {0} is {r}.",
    ),
    kind(
        "set_timer|start_timer|timer",
        "Start a timer.|Count down",
        (
            integer("minutes|duration", 1, 180, "In minutes"),
            text("label|name", values.thing, said=" for the {}"),
        ),
        "Set a timer of {0} minutes|Start a timer of {0} minutes|Timer: {0} minutes",
        always("started"),
        "status",
        "The timer of {0} minutes has {r}.",
    ),
    kind(
        "create_event|add_event|schedule",
        "Put an event into the calendar.|Make an appointment",
        (
            text("title|name|event", values.title),
            text("date|day", values.day, "As year, month, day"),
            text("time|start", values.clock, said=" at {}"),
        ),
        "Put the {0} into my calendar on {1}|Schedule the {0} on {1}|Add the {0} on {1}",
        always("created"),
        "status",
        "The {0} is {r} on {1}.",
    ),
    kind(
        "set_light|light|switch_light",
        "Turn the light of a room on or off.|Lights at home",
        (
            choice("room|place", values.ROOMS),
            Parameter(
                cells("on|enabled|state"), "boolean", one_of((False, True)), words=("off", "on")
            ),
            integer("brightness|level", 1, 100, said=" at {} percent"),
        ),
        "Turn {1} the light in the {0}|Switch the {0} light {1}|Light {1} in the {0}",
        always("done"),
        "status",
        "It is {r}.",
    ),
    kind(
        "order_item|buy|order",
        "Order things in a shop.|Buy something",
        (
            text("item|product", values.thing),
            integer("quantity|count|amount", 2, 50, "How many"),
            choice("size", values.SIZES, " in size {}"),
            text("color", one_of(COLORS), said=" in {}"),
        ),
        "Order {1} of the {0}|Buy the {0}, {1} of them,|I want {1} times the {0}",
        drawn(values.code),
        "order_id",
        "The order has the number {r}.",
    ),
    kind(
        "add_to_list|remember|add_items",
        "Put items on the shopping list.|Remember things",
        Parameter(cells("items|things|entries"), "array", values.words_of(2, 5)),
        "Put these on my list: {0}|Add {0} to the list.|Remember {0}.",
        lambda rng, arguments: f"{len(arguments[0])} added",
        "status",
        "Done: {r}.",
    ),
    kind(
        "write_file|save_file|create_file",
        "Write a file.|Save text",
        (text("path|file|filename", values.path), text("content|text", values.title)),
        "Write {1} to the file {0}.|Save {1} as {0}.|Create {0} with the text {1}.",
        always("ok"),
        "status",
        "{0} is written.",
    ),
    kind(
        "run_command|shell|bash|execute",
        "Run a command in the shell.|Execute a shell command",
        text("command|cmd", values.command),
        "Run {0}|Run the command {0}|Execute {0}",
        drawn(values.title),
        "output",
        "The output is: {r}",
    ),
    kind(
        "play_music|play|start_music",
        "Play music.|Start a song",
        (text("song|title", values.title), choice("genre|style", values.GENRES, " as {}")),
        "Play the song {0}|Play {0}|I want to hear {0}",
        always("playing"),
        "status",
        "{0} is {r}.",
    ),
    kind(
        "book_table|reserve_table|reserve",
        "Book a table in a restaurant.|Make a reservation",
        (
            text("city|location", one_of(CITIES)),
            integer("people|guests|persons", 2, 12),
            text("time|at", values.clock),
        ),
        "Book a table in {0} for {1} people at {2}.|Reserve a table for {1} in {0} at {2}.",
        drawn(values.code),
        "booking",
        "The table is booked, number {r}.",
    ),
    kind(
        "cut_fruit|peel|prepare",
        "Have a fruit prepared.|Kitchen robot",
        (text("fruit|item", one_of(FRUITS)), integer("pieces|parts|count", 2, 99)),
        "Cut the {0} into {1} pieces.|Make {1} pieces of the {0}.",
        always("ready"),
        "status",
        "The {0} is {r}.",
    ),
)
KINDS = (*SUMS, *FINDS, *DOES)
BY_NAME = {kind.names[0]: kind for kind in KINDS}
