"""Word lists of the generated text. Plain data: tuples of strings, nothing computed."""

NAMES = tuple(
    """Alice Bob Carol David Emma Frank Grace Henry Ivy Jack Kate Leo Mia Noah Olivia Peter Quinn
    Rosa Sam Tina Uma Victor Wendy Xavier Yara Zoe Anna Ben Clara Daniel Eva Felix Gina Hugo Ines
    John Karl Laura Max Nina Oscar Paula Ravi Sara Tom Vera Will Maria Omar Lin Yuki Amir Fatima
    Jane Mary James Linda Michael Susan Robert Lisa Paul Mark Julia Lucas Sofia Ella Liam Ada
    Alan Marie""".split()
)

CAPITALS = (
    ("France", "Paris"),
    ("Germany", "Berlin"),
    ("Italy", "Rome"),
    ("Spain", "Madrid"),
    ("Portugal", "Lisbon"),
    ("England", "London"),
    ("the United Kingdom", "London"),
    ("Ireland", "Dublin"),
    ("Japan", "Tokyo"),
    ("China", "Beijing"),
    ("India", "New Delhi"),
    ("Egypt", "Cairo"),
    ("Greece", "Athens"),
    ("Austria", "Vienna"),
    ("Norway", "Oslo"),
    ("Sweden", "Stockholm"),
    ("Finland", "Helsinki"),
    ("Denmark", "Copenhagen"),
    ("Poland", "Warsaw"),
    ("Hungary", "Budapest"),
    ("Russia", "Moscow"),
    ("Turkey", "Ankara"),
    ("Canada", "Ottawa"),
    ("Mexico", "Mexico City"),
    ("Brazil", "Brasilia"),
    ("Argentina", "Buenos Aires"),
    ("Chile", "Santiago"),
    ("Peru", "Lima"),
    ("Cuba", "Havana"),
    ("Kenya", "Nairobi"),
    ("Australia", "Canberra"),
    ("South Korea", "Seoul"),
    ("Thailand", "Bangkok"),
    ("the Netherlands", "Amsterdam"),
    ("Belgium", "Brussels"),
    ("Switzerland", "Bern"),
    ("the United States", "Washington"),
    ("the USA", "Washington"),
    ("Iceland", "Reykjavik"),
    ("Vietnam", "Hanoi"),
)

CITIES = (
    *"""Paris Berlin Rome Madrid Lisbon London Dublin Tokyo Beijing Cairo Athens Vienna Oslo
    Stockholm Helsinki Warsaw Moscow Ottawa Lima Havana Nairobi Seoul Bangkok Amsterdam Brussels
    Bern Washington Boston Chicago Seattle Munich Hamburg Milan Venice Naples Toronto Sydney
    Mumbai Osaka Kyoto Dallas Denver Miami Prague Zurich Geneva Porto Lyon Bonn Shanghai""".split(),
    "New York",
    "San Francisco",
    "Los Angeles",
    "New Delhi",
)

COLORS = tuple(
    "red green blue yellow orange purple pink brown black white grey violet golden silver".split()
)
FRUITS = tuple(
    """apple banana cherry orange pear plum grape lemon mango peach melon kiwi fig lime papaya
    apricot strawberry blueberry raspberry""".split()
)
ANIMALS = tuple(
    """cat dog horse cow pig sheep goat duck hen fox wolf bear lion tiger mouse rabbit frog snake
    eagle owl fish whale shark ant bee spider turtle zebra monkey elephant giraffe deer crow
    swan""".split()
)
JOBS = tuple(
    """teacher doctor baker farmer pilot nurse writer painter singer driver engineer lawyer student
    chef""".split()
)
OBJECTS = tuple(
    """table chair lamp book pen paper box cup plate spoon knife door window house garden tree
    flower river stone road bridge car train boat ship plane ball hat coat shoe ring clock phone
    computer music letter picture mirror key coin bread cheese water milk tea coffee sugar salt
    butter mountain ocean island forest desert field village city street school market kitchen
    bottle basket ladder hammer pencil candle blanket pillow button ticket camera guitar piano
    drum violin planet moon star sun cloud rain snow wind storm summer winter spring autumn
    morning evening night friend family mother father sister brother child teacher doctor king
    queen world hello number language model python banana mississippi keyboard program engine
    token memory kernel tensor matrix vector server client stream""".split()
)
ADJECTIVES = tuple(
    """small big old young happy sad kind brave clever quiet tall tiny gentle curious lucky lazy
    busy friendly silly strong""".split()
)
WORDS = tuple(sorted(set(COLORS + FRUITS + ANIMALS + JOBS + OBJECTS + ADJECTIVES)))

DAYS = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
MONTHS = tuple(
    "January February March April May June July August September October November December".split()
)
MONTH_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINALS = tuple(
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
)

OPPOSITES = (
    ("hot", "cold"),
    ("big", "small"),
    ("up", "down"),
    ("left", "right"),
    ("day", "night"),
    ("happy", "sad"),
    ("fast", "slow"),
    ("old", "young"),
    ("open", "closed"),
    ("light", "dark"),
    ("early", "late"),
    ("strong", "weak"),
    ("full", "empty"),
    ("high", "low"),
    ("long", "short"),
    ("wet", "dry"),
    ("black", "white"),
    ("true", "false"),
    ("yes", "no"),
    ("good", "bad"),
    ("loud", "quiet"),
    ("rich", "poor"),
    ("hard", "soft"),
)
SOUNDS = (
    ("cat", "meow"),
    ("dog", "woof"),
    ("cow", "moo"),
    ("duck", "quack"),
    ("sheep", "baa"),
    ("pig", "oink"),
    ("lion", "roar"),
    ("bee", "buzz"),
)
THING_COLORS = (
    ("the sky", "blue"),
    ("grass", "green"),
    ("snow", "white"),
    ("a banana", "yellow"),
    ("a cherry", "red"),
    ("coal", "black"),
    ("the sun", "yellow"),
    ("milk", "white"),
    ("a carrot", "orange"),
    ("chocolate", "brown"),
    ("a lemon", "yellow"),
    ("a frog", "green"),
    ("blood", "red"),
)
QUANTITIES = (
    ("days are in a week", 7),
    ("months are in a year", 12),
    ("hours are in a day", 24),
    ("minutes are in an hour", 60),
    ("seconds are in a minute", 60),
    ("legs does a spider have", 8),
    ("legs does a dog have", 4),
    ("legs does an insect have", 6),
    ("letters are in the English alphabet", 26),
    ("sides does a triangle have", 3),
    ("sides does a square have", 4),
    ("sides does a hexagon have", 6),
    ("weeks are in a year", 52),
    ("days are in a year", 365),
    ("wheels does a car have", 4),
    ("wheels does a bicycle have", 2),
    ("planets are in the solar system", 8),
    ("continents are there", 7),
    ("bits are in a byte", 8),
    ("centimeters are in a meter", 100),
)

UNITS = tuple(
    """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen""".split()
)
TENS = ("", "", *tuple("twenty thirty forty fifty sixty seventy eighty ninety".split()))
