"""An assistant that is asked for things in plain words and calls functions, described to it as JSON schemas.

    python examples/run.py assistant      # a warm start - how a call is written - and two seeds

Twenty functions, three of them offered with each question. What a function and its arguments are called is drawn for
each row, so that names have to be read and cannot be learned by heart. Held-out rows are of three kinds, scored apart:
"seen", new values in sentences and functions of training; "wording", sentences that are never met in training, of
functions that are; "function", the last four functions, never met at all. The reward is `calls` (scoring/calls.py). For
xLAM's and ToolACE's columns, and for your own, see recipes/function_calling.py.
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from envs.tools import instructions  # noqa: E402
from scoring.calls import calls  # noqa: E402

WHOLE, NUMBER, SWITCH = {"type": "integer"}, {"type": "number"}, {"type": "boolean"}
LANGUAGES = {"type": "string", "enum": ["French", "German", "Italian", "Polish", "Turkish"]}
VALUES = {  # kind of an argument: what it may be
    "city": "Arden Brook Calder Dover Elgin Fulham Glade Harrow Irvine Jarrow Kendal Luton".split(),
    "day": "today tomorrow Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "time": [f"{hour}:{minute:02}" for hour in range(6, 23) for minute in range(0, 60, 5)],
    "person": "Ada Ben Cleo Dan Eva Finn Gus Hana Ivo June Kai Lena Max Nora Otto Pia".split(),
    "saying": ["I am late", "happy birthday", "see you soon", "the train is full", "call me back", "well done"],
    "room": ["kitchen", "bedroom", "hall", "office", "cellar", "garage", "attic", "bathroom"],
    "thing": ["milk", "bread", "apples", "soap", "rice", "onions", "paper", "tea", "eggs", "candles"],
    "task": ["water the plants", "pay the rent", "feed the cat", "buy stamps", "charge the car", "clean the oven"],
    "artist": ["the Long Fields", "Mira Holt", "Seven Lamps", "Otis Grey", "the Paper Boats", "Lola Marsh"],
    "word": ["bridge", "cloud", "window", "spoon", "harbour", "ladder", "winter", "candle"],
    "unit": ["miles", "metres", "feet", "inches", "yards"],
    "whole": range(2, 100),
    "number": [n / 2 for n in range(3, 80, 2)],
    "switch": [True, False],
    "language": LANGUAGES["enum"],
}
SCHEMAS = {"whole": WHOLE, "number": NUMBER, "switch": SWITCH, "language": LANGUAGES}  # the others are text
HELD_OUT = 4  # the last functions
FUNCTIONS = [  # names, what it does, {names of an argument: its kind}, sentences; the last sentence is held out
    (
        ("get_weather", "forecast", "weather_report"),
        "Weather of a day",
        {"city place town": "city", "day date": "day"},
        [
            "tell me the weather in {0} {1}",
            "check what {0} will be like {1}, rain or sun",
            "give me {1}'s forecast of {0}",
        ],
        "find out whether I need an umbrella in {0} {1}",
    ),
    (
        ("set_timer", "start_timer", "countdown"),
        "Start a timer",
        {"minutes duration": "whole", "label name": "thing"},
        ["set a timer of {0} minutes for the {1}", "time the {1}, {0} minutes", "start {0} minutes on the {1} timer"],
        "let me know about the {1} once {0} minutes are over",
    ),
    (
        ("set_alarm", "wake_up", "add_alarm"),
        "Ring at a time",
        {"time at": "time", "day date": "day"},
        ["wake me at {0} {1}", "set an alarm for {0} {1}", "let the alarm ring {1} at {0}"],
        "get me out of bed {1} at {0}",
    ),
    (
        ("send_message", "text_someone", "write_to"),
        "Send a message",
        {"person recipient to": "person", "text message body": "saying"},
        ["send {0} the message: {1}", "text {0} that {1}", "write to {0}: {1}"],
        "let {0} know: {1}",
    ),
    (
        ("make_call", "phone", "ring_up"),
        "Call somebody",
        {"person contact": "person", "time at": "time"},
        ["call {0} at {1}", "phone {0} when it is {1}", "ring {0} up at {1}"],
        "get {0} on the line at {1}",
    ),
    (
        ("set_light", "dim", "lights"),
        "Set a room's brightness",
        {"room where": "room", "percent brightness level": "whole"},
        [
            "set the light in the {0} to {1} percent",
            "dim the {0} to {1} percent",
            "give me {1} percent light in the {0}",
        ],
        "have the lamps of the {0} burn at {1} percent",
    ),
    (
        ("switch_heating", "heating", "radiator"),
        "Heat a room or stop",
        {"room where": "room", "on active": "switch"},
        ["turn the heating in the {0} {1}", "turn {1} the radiator of the {0}", "switch the {0} heating {1}"],
        "see that the {0}'s heating is {1}",
    ),
    (
        ("play_music", "play", "start_music"),
        "Play an artist",
        {"artist musician": "artist", "volume loudness": "whole"},
        ["play {0} at volume {1}", "put on some {0}, volume {1}", "start {0} with the volume at {1}"],
        "let me hear {0}, as loud as {1}",
    ),
    (
        ("add_to_list", "shopping_list", "put_on_list"),
        "Put a thing on the shopping list",
        {"item product": "thing", "count amount quantity": "whole"},
        ["put {1} packs of {0} on the list", "add {0} to my shopping, {1} packs", "note that we need {1} packs of {0}"],
        "make sure I bring home {0}, {1} packs",
    ),
    (
        ("convert_length", "convert", "to_unit"),
        "Convert from one unit to another",
        {"value amount": "number", "source from_unit": "unit", "target to_unit": "unit"},
        ["convert {0} {1} to {2}", "tell me how many {2} are {0} {1}", "turn {0} {1} into {2}"],
        "work out {0} {1} in {2}",
    ),
    (
        ("book_table", "reserve", "reservation"),
        "Book a table",
        {"guests people": "whole", "time at": "time", "day date": "day"},
        [
            "book a table for {0} at {1} {2}",
            "reserve for {0} people {2} at {1}",
            "get us a table {2}, {0} of us, at {1}",
        ],
        "see that {0} of us can eat out {2} at {1}",
    ),
    (
        ("find_train", "trains", "train_search"),
        "Look for trains",
        {"origin start": "city", "destination goal": "city", "day date": "day"},
        [
            "find a train from {0} to {1} {2}",
            "look up trains to {1} from {0} {2}",
            "show me how to get from {0} to {1} {2}",
        ],
        "get me to {1} by rail {2}, I start in {0}",
    ),
    (
        ("remind", "add_reminder", "remember"),
        "Remind of a task",
        {"task what": "task", "time at": "time"},
        ["remind me to {0} at {1}", "make me {0} at {1}", "set a reminder for {1}: {0}"],
        "do not let me forget at {1} to {0}",
    ),
    (
        ("distance", "how_far", "measure_way"),
        "Distance of two places",
        {"origin start": "city", "destination goal": "city", "unit measure": "unit"},
        [
            "tell me how far {1} is from {0} in {2}",
            "give the distance from {0} to {1} in {2}",
            "measure {0} to {1} in {2}",
        ],
        "count the {2} between {0} and {1}",
    ),
    (
        ("lock_door", "door_lock", "set_lock"),
        "Lock a door for some minutes",
        {"room where": "room", "minutes duration": "whole"},
        ["lock the {0} for {1} minutes", "keep the {0} door locked for {1} minutes", "shut the {0} for {1} minutes"],
        "let nobody into the {0} for {1} minutes",
    ),
    (
        ("meeting", "add_event", "schedule"),
        "Put a meeting into the calendar",
        {"person guest": "person", "day date": "day", "time start": "time"},
        [
            "plan a meeting with {0} {1} at {2}",
            "enter {0} into my calendar {1} at {2}",
            "meet {0} {1} at {2}, write it down",
        ],
        "block {2} {1} for {0}",
    ),
    (
        ("order_taxi", "taxi", "get_cab"),
        "Order a taxi",
        {"destination goal": "city", "passengers people": "whole", "time at": "time"},
        [
            "order a taxi to {0} for {1} at {2}",
            "get {1} of us a cab to {0} at {2}",
            "call a taxi for {1} at {2}, to {0}",
        ],
        "have a driver take {1} people to {0} at {2}",
    ),
    (
        ("set_temperature", "thermostat", "warm_room"),
        "Set a room's temperature",
        {"room where": "room", "degrees temperature": "number"},
        ["set the {0} to {1} degrees", "make the {0} {1} degrees warm", "keep {1} degrees in the {0}"],
        "see that the {0} has {1} degrees",
    ),
    (
        ("translate", "translation", "say_in"),
        "Translate a word",
        {"word text": "word", "language target": "language"},
        ["translate {0} into {1}", "tell me the {1} word for {0}", "say {0} in {1}"],
        "look up what {0} is called in {1}",
    ),
    (
        ("send_money", "pay", "transfer"),
        "Pay somebody",
        {"person recipient to": "person", "amount sum": "number"},
        ["send {0} {1} dollars", "pay {1} dollars to {0}", "transfer {1} dollars to {0}"],
        "settle my debt of {1} dollars with {0}",
    ),
]
OPENERS = ["Please {}.", "Can you {}?", "I want you to {}.", "{}, please.", "Could you please {}?", "{}."]
OTHER_OPENERS = ["It would help me if you could {}.", "Would you mind? I need someone to {}."]
KINDS = {"train": ["seen"], "test": ["seen", "wording", "function"]}
COUNTS = {"train": 2000, "test": 90}


def rows(split: str = "train", seed: int = 42) -> list[dict]:
    if split not in KINDS:
        raise ValueError(f"split {split!r}: the assistant has {', '.join(KINDS)}.")
    chance, made, met = random.Random(f"assistant {split}"), [], set()  # by no seed
    seen = {row["prompt"][1]["content"] for row in rows("train")} if split == "test" else set()
    while len(made) < COUNTS[split]:
        one = row(chance, KINDS[split][len(made) % len(KINDS[split])])
        if (question := one["prompt"][1]["content"]) not in met | seen:
            met.add(question)
            made.append(one)
    return made


def row(chance: random.Random, kind: str) -> dict:
    known, new = FUNCTIONS[:-HELD_OUT], FUNCTIONS[-HELD_OUT:]
    wanted = chance.choice(new if kind == "function" else known)
    offered = chance.sample([one for one in (FUNCTIONS if kind == "function" else known) if one is not wanted], 2)
    schemas = []
    for names, about, arguments, *_ in [*offered, wanted]:
        called = [chance.choice(names.split()) for names in arguments]
        properties = {n: SCHEMAS.get(k, {"type": "string"}) for n, k in zip(called, arguments.values(), strict=True)}
        parameters = {"type": "object", "properties": properties, "required": called}
        schemas.append({"name": chance.choice(names), "description": about, "parameters": parameters})
    _, _, arguments, trained, held_out = wanted  # whose schema and names are the last
    values = [chance.choice(VALUES[kind]) for kind in arguments.values()]
    right = [{"name": schemas[-1]["name"], "arguments": dict(zip(called, values, strict=True))}]
    sentence = held_out if kind == "wording" else chance.choice(trained)
    question = chance.choice(OTHER_OPENERS if kind == "wording" else OPENERS).format(
        sentence.format(*map(said, values))
    )
    chance.shuffle(schemas)
    told = instructions([{"function": schema} for schema in schemas], "hermes")
    prompt = [{"role": "system", "content": told}, {"role": "user", "content": question[0].upper() + question[1:]}]
    return {"prompt": prompt, "wanted": json.dumps(right), "kind": kind}


def said(value) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def asked_for(completions, wanted, kind, **columns) -> list[dict]:
    """The reward `calls`, and what it says of each kind of row."""
    scores = calls(completions, wanted)
    parts = ("arguments", "exact")
    return [s | {f"{of}/{part}": s[part] for part in parts} for s, of in zip(scores, kind, strict=True)]


def demonstrate(row: dict, environment, answers: list) -> str:
    """One who is careless: of six calls in ten a value is another one's, or the function."""
    (call,) = json.loads(row["wanted"])
    if random.random() < 0.6:
        slip = random.choice([*call["arguments"], "name"])
        if slip == "name":
            call["name"] = random.choice(random.choice(FUNCTIONS[:-HELD_OUT])[0])
        else:
            call["arguments"][slip] = random.choice(VALUES[random.choice(["whole", "person", "city", "time", "thing"])])
    return f"<tool_call>{json.dumps(call)}</tool_call>"
