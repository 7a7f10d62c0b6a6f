"""The closed lists of names that the grammar knows: functions, Greek letters, units,
nouns, words.
"""


def words_of(text: str) -> frozenset[str]:
    """Return the words of a text with blanks between them."""
    return frozenset(text.split())


FUNCTIONS = {
    r"\sin": "sin",
    r"\cos": "cos",
    r"\tan": "tan",
    r"\cot": "cot",
    r"\sec": "sec",
    r"\csc": "csc",
    r"\arcsin": "arcsin",
    r"\arccos": "arccos",
    r"\arctan": "arctan",
    r"\sinh": "sinh",
    r"\cosh": "cosh",
    r"\tanh": "tanh",
    r"\ln": "ln",
    r"\log": "log",
    r"\lg": "lg",
    r"\exp": "exp",
    r"\gcd": "gcd",
    r"\max": "max",
    r"\min": "min",
    r"\lcm": "lcm",
    r"\det": "det",
    r"\dim": "dim",
    r"\arg": "arg",
    r"\deg": "deg",
    r"\Re": "re",
    r"\Im": "im",
    r"\Pr": "probability",
    "sin": "sin",
    "cos": "cos",
    "tan": "tan",
    "cot": "cot",
    "sec": "sec",
    "csc": "csc",
    "arcsin": "arcsin",
    "arccos": "arccos",
    "arctan": "arctan",
    "asin": "arcsin",
    "acos": "arccos",
    "atan": "arctan",
    "sinh": "sinh",
    "cosh": "cosh",
    "tanh": "tanh",
    "ln": "ln",
    "log": "log",
    "lg": "lg",
    "exp": "exp",
    "gcd": "gcd",
    "lcm": "lcm",
    "max": "max",
    "min": "min",
    "abs": "abs",
    "floor": "floor",
    "ceil": "ceil",
    "sqrt": "sqrt",
    "cbrt": "cbrt",
    "arccot": "arccot",
    "sgn": "sign",
    "sign": "sign",
    "binom": "binom",
}
INVERSES = {
    "sin": "arcsin",
    "cos": "arccos",
    "tan": "arctan",
    "cot": "arccot",
    "sinh": "arcsinh",
    "cosh": "arccosh",
    "tanh": "arctanh",
}
LISTS = frozenset({"gcd", "lcm", "max", "min", "binom"})
"""Functions of several arguments."""
GREEK_LETTERS = words_of(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi"
    " rho varrho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma"
    " Upsilon Phi Psi Omega"
)
INFINITE = frozenset({r"\infty", "infinity", "inf", "infty", "oo"})
ACCENTS = words_of(
    r"\vec \overline \bar \hat \tilde \dot \ddot \overrightarrow \overarc \widetilde"
)
SHAPES = words_of(r"\angle \triangle \odot \measuredangle")
CALLED = frozenset("fgFG")
"""Letters whose brackets hold an argument; behind other letters they are factors."""
NUMBER_SETS = frozenset({r"\mathbb{R}", r"\mathbb{Z}", r"\mathbb{N}", r"\mathbb{Q}", r"\mathbb{C}"})

ENGLISH = words_of(
    "no on is as to of in at it if so by we he an am or do go up us be me my ok the and for not yes"
    " one two six ten odd all any day man men but are was has had can may out now new old big red"
    " set sum box cup mod per sq cm mm km kg mg ml ft lb oz hr hrs min sec mph kmh eur usd deg rad"
    " pm iff let def var min max nor its few far top end low her his she him you our who why how"
    " mon tue wed thu fri sat sun jan feb mar apr jun jul aug sep oct nov dec even true false none"
    " get got let use add see say ask put try via yet too per got"
)
"""Short words that are no products of variables."""
AND = frozenset({"and", r"\land", r"\and", "&"})
OR = frozenset({"or", r"\lor"})
FILLERS = frozenset(
    {"where", "with", "for", "all", "any", "some", "every", "each", r"\forall", "whenever", "when"}
)
"""Words before the condition of a family, `x = 2k\\pi \\text{ for all } k \\in
\\mathbb{Z}`.
"""
CONDITIONS = frozenset({"if", "for", "when", "where", "provided", "that", "on"})
ELSEWHERE = frozenset({"otherwise", "else", "elsewhere"})
BASES = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "eleven": 11,
    "twelve": 12,
    "sixteen": 16,
}


def _named(*groups: str) -> dict[str, str]:
    """Return word ─► its group's first word."""
    return {word: group.split()[0] for group in groups for word in group.split()}


UNITS = _named(
    "mm millimeter millimeters millimetre millimetres",
    "cm centimeter centimeters centimetre centimetres 厘米",
    "dm decimeter decimeters decimetre decimetres",
    "meter meters metre metres 米",
    "km kilometer kilometers kilometre kilometres kms 千米 公里",
    "inch inches in",
    "foot feet ft",
    "yard yards yd yds",
    "mile miles mi",
    "gram grams gm gms 克",
    "mg milligram milligrams",
    "kg kilogram kilograms kgs kilo kilos 千克 公斤",
    "ton tons tonne tonnes 吨",
    "pound pounds lb lbs",
    "ounce ounces oz",
    "liter liters litre litres 升",
    "ml milliliter milliliters millilitre millilitres mL 毫升",
    "gallon gallons gal",
    "quart quarts",
    "pint pints",
    "cup cups",
    "tablespoon tablespoons tbsp",
    "teaspoon teaspoons tsp",
    "second seconds sec secs 秒",
    "ms millisecond milliseconds",
    "minute minutes min mins 分钟",
    "hour hours hr hrs 小时",
    "day days 天",
    "week weeks",
    "month months 个月",
    "year years yr yrs 年 岁",
    "degree degrees deg °",
    "radian radians rad rads",
    "unit units",
    "percent percents %",
    "dollar dollars usd $ bucks",
    "cent cents ¢",
    "euro euros eur €",
    "£ gbp",
    "¥ yen yuan rmb 元",
    "rupee rupees rs ₹",
    "peso pesos",
    "mph",
    "kph kmh kmph",
    "celsius",
    "fahrenheit",
    "kelvin kelvins",
    "newton newtons",
    "joule joules kJ",
    "watt watts",
    "volt volts",
    "amp amps ampere amperes",
    "ohm ohms",
    "hertz Hz hz",
    "pascal pascals Pa kPa",
    "acre acres",
    "hectare hectares",
    "mole moles mol",
)
LETTER_UNITS = {
    "d": "day",
    "g": "gram",
    "h": "hour",
    "l": "liter",
    "m": "meter",
    "s": "second",
    "L": "liter",
    "A": "amp",
    "C": "celsius",
    "F": "fahrenheit",
    "J": "joule",
    "K": "kelvin",
    "N": "newton",
    "T": "tesla",
    "V": "volt",
    "W": "watt",
}
"""Units of one letter. They count only in upright type, or behind a blank after a
number.
"""
ONLY_APART = frozenset(
    {"mg", "ml", "ms", "in", "min", "sec", "gal", "rad", "deg", "mi", "gm", "rs", "mol", "cup"}
)
"""Units that could be products of variables or words: the same."""
SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
"""Words behind a number that multiply it."""
POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}


def _plural(noun: str) -> str:
    """Return a noun's plural by the rules of spelling: boxes, stories, keys."""
    if noun.endswith(("x", "ch", "sh", "ss")):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2] not in "aeo":
        return f"{noun[:-1]}ies"
    return f"{noun}s"


COUNTED = words_of(
    "student boy girl teacher player worker member friend team group class family adult kid guest"
    " customer passenger apple orange banana egg cookie cake candy pencil pen book page card coin"
    " ball marble block tile cube chair table car bike truck wheel tree flower plant animal dog cat"
    " bird chicken cow pig horse rabbit leg head ticket game point goal time way path route"
    " solution root pair triple value number integer digit word letter term step move turn trip lap"
    " sticker toy shirt sock shoe dress stamp bag bottle glass jar basket packet pack sandwich"
    " pizza slice bowl plate room house floor window door seat row column line segment triangle"
    " square rectangle circle side face edge corner region subset element set function permutation"
    " arrangement combination outcome question answer problem mark vote stone bead rock shell"
    " carrot peach cherry grape berry strawberry blueberry watermelon pear mango lemon balloon"
    " cupcake muffin donut brownie crayon marker eraser notebook magazine photo picture painting"
    " song video movie episode chapter story planet star bus train plane boat ship job shift call"
    " message email gift present box bunch dish watch"
)
NOUNS = _named(
    "person persons people 人",
    "child children",
    "man men",
    "woman women",
    "fish",
    "sheep",
    "vertex vertices",
    "item items 个 本 只",
    *(f"{noun} {_plural(noun)}" for noun in sorted(COUNTED)),
)
"""Words for what is counted. They belong to a number as a unit does."""
AFTER = words_of(
    "of thousand hundred million billion trillion dozen dozens half halves third thirds fourth"
    " fourths quarter quarters fifth fifths sixth sixths seventh eighth ninth tenth tenths"
    " hundredths squared cubed factorial modulo mod less more fewer times or to than over below"
    " above minus plus divided multiplied base choose score pairs p.m a.m pm am 万 亿 千 百 十 萬"
    " 億 分 余 多"
)
"""Words behind a number that change its value or say that it is a bound."""
MAGNITUDES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Words behind a number that multiply it, with their powers of ten."""
BEFORE = words_of(
    "not least most than nearly almost under over below above minus negative plus exceeding about"
    " approximately roughly around beyond except between from up within up fewer more less isn't"
    " aren't wasn't n't never without every per base mod modulo twice thrice half double triple"
    " step part case equation question figure problem chapter section page example line row method"
    " exercise theorem lemma rule root factor multiple power"
)
"""Words before a number in prose that say that it is no answer."""
NEGATIONS = words_of("not cannot can't isn't aren't wasn't won't never neither nor without")
"""Words that deny a number a little way behind them."""
TOTALS = words_of("total value answer result")
"""Words whose `of` has the answer behind it: a total of 5."""
