"""Two hundred JSON schemas of the kinds that public services use: fifty records of many trades,
each in four forms.

Records are written one a line, `name: field=type …`; `?` after a field makes it optional. Sizes are
bounded, so that a model with random weights comes to an end.
"""

from __future__ import annotations

import json
import re
from typing import Any

RECORDS = """
user: id=uuid name=text30 age=int0..120 email=email? active=bool
address: street=text40 city=text20 zip=/[0-9]{5}(-[0-9]{4})?/ country=one(DE,FR,US,JP)
  apartment=text10|null
event: title=text40 start=date-time end=date-time? attendees=list0..3(email) all_day=bool
invoice: number=/INV-[0-9]{6}/ total=num0..100000 currency=one(EUR,USD,GBP) paid=bool due=date
product: sku=/[A-Z]{3}-[0-9]{4}/ price=num0.01..9999 stock=int0..1000 tags=list0..4(text12)
  rating=num0..5|null
weather: city=text20 celsius=num-60..60 humidity=int0..100 sky=one(clear,cloudy,rain,snow)
  at=date-time?
move: piece=one(K,Q,R,B,N,P) from=/[a-h][1-8]/ to=/[a-h][1-8]/ check=bool
host: name=text20 address=ipv4 gateway=ipv4? ports=list1..3(int1..65535) up=bool
book: isbn=/97[89][0-9]{10}/ title=text40 authors=list1..3(text20) year=int1450..2100
  genre=one(fiction,science,poetry)?
colour: red=int0..255 green=int0..255 blue=int0..255 alpha=num0..1? name=text12|null
point: x=num-1000..1000 y=num-1000..1000 z=num-1000..1000? label=text8?
flight: code=/[A-Z]{2}[0-9]{3,4}/ origin=/[A-Z]{3}/ target=/[A-Z]{3}/ departs=time gate=text4|null
song: title=text30 seconds=int1..3600 bpm=int40..240? key=one(C,D,E,F,G,A,B) explicit=bool
job: title=text30 salary=int0..500000|null remote=bool skills=list1..4(text12)
  level=one(junior,senior,lead)
ticket: id=int1..99999 priority=one(1,2,3) status=one(open,closed) labels=list0..3(text10)
  assignee=text15|null
recipe: name=text30 minutes=step5,5..240 servings=int1..12 steps=list1..4(text40) vegan=bool
vote: poll=uuid option=int0..9 weight=num0..1? anonymous=bool
sensor: serial=/[0-9A-F]{8}/ kind=one(temperature,pressure) value=num-500..500 unit=one(C,hPa)
  faulty=bool?
patient: born=date blood=one(A,B,AB,0) kilograms=num1..400 allergies=list0..3(text15)
  smoker=bool|null
loan: amount=int100..1000000 percent=num0..30 months=int1..480 approved=bool reason=text30?
login: user=/[a-z][a-z0-9_]{2,11}/ at=date-time from=ipv4 success=bool
  second_factor=one(totp,key,none)
commit: hash=/[0-9a-f]{40}/ author=text20 message=text50 files=int0..500 merge=bool?
parcel: code=/[A-Z]{2}[0-9]{9}[A-Z]{2}/ grams=int1..30000 fragile=bool delivered=date|null
course: name=text30 credits=one(2,3,5) weekday=one(Mon,Tue,Wed,Thu,Fri) room=text6? seats=int1..300
review: stars=int1..5 text=text60 helpful=int0..9999? verified=bool reply=text40|null
car: plate=/[A-Z]{1,3}-[A-Z]{2} [0-9]{1,4}/ make=text12 year=int1950..2030
  fuel=one(petrol,diesel,electric) km=int0..999999
transfer: from=/[A-Z]{2}[0-9]{20}/ to=/[A-Z]{2}[0-9]{20}/ cents=int1..10000000 note=text20?
  instant=bool
match: home=text12 away=text12 score=pair(int0..20,int0..20) finished=bool minute=int0..120?
box: width=over0,1000 height=over0,1000 depth=over0,1000 unit=const(cm) stackable=bool
entity: text=text20 label=one(PER,ORG,LOC) start=int0..9999 end=int0..9999 score=num0..1?
sentiment: label=one(positive,negative,neutral) score=num0..1 reasons=list0..2(text30)
call: function=one(get_weather,get_time) arguments=obj(city:text20,unit:one(C,F)) id=text9?
query: table=one(users,orders) columns=list1..4(text10) limit=int1..100 where=text30|null
  order=one(asc,desc)?
route: from=pair(num-90..90,num-180..180) to=pair(num-90..90,num-180..180) metres=int0..9999999
  toll=bool
animal: species=text20 legs=one(0,2,4,6,8) weight=num0..10000 extinct=bool habitat=list0..2(text12)
planet: name=text12 mass=num0..10000 moons=int0..200 rings=bool discovered=int1600..2100|null
alarm: at=time days=list0..7(one(Mo,Tu,We,Th,Fr,Sa,Su)) enabled=bool label=text15?
certificate: subject=text30 serial=/[0-9a-f]{16}/ from=date until=date bits=one(2048,3072,4096)
movie: title=text40 year=int1890..2100 rating=num0..10 cast=list1..3(obj(name:text20,role:text20))
  sequel=bool
plant: latin=text30 common=text20|null height=num0..120 sun=one(full,half,shade) edible=bool?
bug: severity=one(low,high) steps=list1..3(text30) version=/[0-9]{1,2}\\.[0-9]{1,2}\\.[0-9]{1,3}/
  fixed=bool os=text10?
node: name=text10 size=int0..4096 hidden=bool owner=text10? mode=/[0-7]{3}/
person: given=text15 family=text15 born=date? height=over0,3 languages=list0..3(one(de,en,fr,es))
budget: year=const(2024) items=list1..3(obj(name:text15,cents:int0..99999)) balanced=bool
translation: source=one(de,en) target=one(fr,es) text=text50 formal=bool?
  alternatives=list0..2(text30)
lamp: on=bool level=int0..100 kelvin=step100,1500..6500? scene=text10|null
exam: grade=one(1,2,3,4,5) points=int0..100 passed=bool comment=text40?
vm: image=text15 cpus=one(1,2,4,8) gigabytes=int1..256 address=ipv4?
  disks=list1..2(obj(gb:int1..999,ssd:bool))
answer: reasoning=text60 final=int-1000..1000 confidence=num0..1 sources=list0..2(text20)?
shift: worker=text15 begins=time ends=time breaks=list0..2(int5..60) night=bool
"""

TYPES: list[tuple[str, Any]] = [
    (r"text(\d+)", lambda n: {"type": "string", "maxLength": int(n)}),
    (
        r"int(-?\d+)\.\.(-?\d+)",
        lambda a, b: {"type": "integer", "minimum": int(a), "maximum": int(b)},
    ),
    (
        r"num(-?[\d.]+)\.\.(-?\d+)",
        lambda a, b: {"type": "number", "minimum": float(a), "maximum": int(b)},
    ),
    (
        r"step(\d+),(\d+)\.\.(\d+)",
        lambda s, a, b: {
            "type": "integer",
            "multipleOf": int(s),
            "minimum": int(a),
            "maximum": int(b),
        },
    ),
    (
        r"over(\d+),(\d+)",
        lambda a, b: {"type": "number", "exclusiveMinimum": int(a), "exclusiveMaximum": int(b)},
    ),
    (r"const\((.*)\)", lambda value: {"const": scalar(value)}),
    (r"one\((.*)\)", lambda values: {"enum": [scalar(value) for value in values.split(",")]}),
    (
        r"list(\d+)\.\.(\d+)\((.*)\)",
        lambda a, b, item: {
            "type": "array",
            "items": typed(item),
            "minItems": int(a),
            "maxItems": int(b),
        },
    ),
    (
        r"pair\((.*),(.*)\)",
        lambda a, b: {
            "type": "array",
            "prefixItems": [typed(a), typed(b)],
            "items": False,
            "minItems": 2,
        },
    ),
    (r"obj\((.*)\)", lambda inner: record(re.sub(r",(?=\w+:)", " ", inner).replace(":", "="))),
    (r"/(.*)/", lambda pattern: {"type": "string", "pattern": f"^{pattern}$"}),
    (r"(bool)", lambda _: {"type": "boolean"}),
    (r"(uuid|email|date|time|date-time|ipv4)", lambda name: {"type": "string", "format": name}),
]


def scalar(text: str) -> str | int:
    """The text as a number, if it is one."""
    return int(text) if text.isdecimal() else text


def typed(text: str) -> dict[str, Any]:
    """The schema of one field."""
    if text.endswith("|null"):
        inner = typed(text.removesuffix("|null"))
        return (
            inner | {"type": [inner["type"], "null"]}
            if set(inner) <= {"type", "maxLength"}
            else {"anyOf": [inner, {"type": "null"}]}
        )
    for pattern, make in TYPES:
        if found := re.fullmatch(pattern, text):
            return make(*found.groups())
    raise ValueError(text)


def record(fields: str) -> dict[str, Any]:
    """An object schema without other properties."""
    parts = [part.partition("=") for part in re.split(r" (?=\w+=)", fields)]
    optional = {name for name, _, kind in parts if kind.endswith("?")}
    properties = {name: typed(kind.removesuffix("?")) for name, _, kind in parts}
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def as_list(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A list of records that refer to a shared definition, as generators of schemas write it."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{name.capitalize()}List",
        "$defs": {name: schema | {"title": name, "description": f"A {name}."}},
        "type": "object",
        "properties": {
            "items": {"type": "array", "items": {"$ref": f"#/$defs/{name}"}, "maxItems": 2},
            "next": {"type": ["null", "boolean"]},
        },
        "required": ["items"],
        "additionalProperties": False,
    }


def as_result(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A record or an error, told apart by a constant."""
    found = {
        "type": "object",
        "properties": {"kind": {"const": name}, "value": schema},
        "required": ["kind", "value"],
    }
    error = {
        "type": "object",
        "properties": {
            "kind": {"const": "error"},
            "code": {"type": "integer", "minimum": 400, "maximum": 599},
        },
        "required": ["kind", "code"],
    }
    return {
        "anyOf": [found | {"additionalProperties": False}, error | {"additionalProperties": False}]
    }


def as_tree(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A record with others nested in it, and a map of remarks by date."""
    remarks = {
        "type": "object",
        "patternProperties": {"^[0-9]{4}-[0-9]{2}$": {"type": "string", "maxLength": 10}},
    }
    return {
        "definitions": {name: schema},
        "type": "object",
        "properties": {
            name: {"allOf": [{"$ref": f"#/definitions/{name}"}]},
            "below": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
            "remarks": remarks | {"additionalProperties": False, "maxProperties": 2},
        },
        "required": [name, "below"],
        "additionalProperties": False,
    }


def every() -> dict[str, dict[str, Any]]:
    """The two hundred, by name."""
    found: dict[str, dict[str, Any]] = {}
    for line in RECORDS.strip().replace("\n  ", " ").splitlines():
        name, _, fields = line.partition(": ")
        plain = record(fields)
        found |= {
            name: plain,
            f"{name}-list": as_list(name, plain),
            f"{name}-result": as_result(name, plain),
            f"{name}-tree": as_tree(name, plain),
        }
    return json.loads(json.dumps(found))
