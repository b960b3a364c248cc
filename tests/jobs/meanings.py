# ruff: noqa: ISC004, E501
"""Functions as source text, and ways in which what they mean can change: for tests of identity.

Each text defines `p`. `made(text)` runs it as a module of its own.
"""

from __future__ import annotations

import sys
import types
from typing import Any


def made(text: str, name: str = "made_for_a_test") -> dict[str, Any]:
    """The names of a module with this text. It has helpers, a module of the user's own."""
    helpers = types.ModuleType("helpers_for_a_test")
    sys.modules["helpers_for_a_test"] = helpers
    inner = types.ModuleType("helpers_for_a_test.inner")
    exec("SHIFT = 3.0\nEMPTY = {}\n", vars(inner))
    vars(helpers)["inner"] = inner
    sys.modules["helpers_for_a_test.inner"] = inner
    exec("scale = 2.0\nOFFSET = [1.0]\nunused = 1\n\ndef twice(z):\n    return z * scale\n", vars(helpers))
    module = sys.modules[name] = types.ModuleType(name)
    exec(text, vars(module))
    return vars(module)


CHANGES: dict[str, tuple[str, str]] = {
    # What the function is, and what is run to change it.
    "a number in a global list": ("G = [.1]\ndef p(z): return z + G[0]", "G[0] = 2."),
    "a global list grows": ("G = [.1]\ndef p(z): return z + sum(G)", "G.append(.1)"),
    "a global number": ("S = 2\ndef p(z): return z * S", "S = 3"),
    "a number becomes a float": ("S = 2\ndef p(z): return z * S", "S = 2.0"),
    "a global dict": ("D = {'a': 1}\ndef p(z): return z * D['a']", "D['a'] = 2"),
    "the order of a dict": (
        "D = {'a': 1, 'b': 2}\ndef p(z): return z * [*D.values()][0]",
        "D = {'b': 2, 'a': 1}",
    ),
    "a nested dict": ("D = {'a': {'b': [1]}}\ndef p(z): return z * D['a']['b'][0]", "D['a']['b'][0] = 2"),
    "a global set": ("S = {1, 2}\ndef p(z): return z * len(S)", "S.add(3)"),
    "a global tensor": ("import torch\nT = torch.ones(3)\ndef p(z): return z * T", "T[1] = 2"),
    "a tensor through .data": ("import torch\nT = torch.ones(3)\ndef p(z): return z * T", "T.data[1] = 2"),
    "a tensor's dtype": ("import torch\nT = torch.ones(3)\ndef p(z): return z * T", "T = T.double()"),
    "a numpy array": ("import numpy as np\nA = np.ones(3)\ndef p(z): return z * A[0]", "A[0] = 2"),
    "an array's shape": (
        "import numpy as np\nA = np.ones(4)\ndef p(z): return z * A[0]",
        "A = A.reshape(2, 2)",
    ),
    "an array of objects": (
        "import numpy as np\nA = np.array([[1], 'a'], dtype=object)\ndef p(z): return z * A[0][0]",
        "A[0][0] = 2",
    ),
    "a masked array": (
        "import numpy as np\nA = np.ma.array([1., 2.], mask=[0, 1])\ndef p(z): return z * A.sum()",
        "A.mask[0] = True",
    ),
    "a numpy number": ("import numpy as np\nS = np.float32(2)\ndef p(z): return z * S", "S = np.float64(2)"),
    "a weight of a global module": (
        "import torch\nM = torch.nn.Linear(2, 2)\ndef p(z): return M(z)",
        "M.weight.data[0, 0] += 1",
    ),
    "a buffer of a global module": (
        "import torch\nM = torch.nn.BatchNorm1d(2)\ndef p(z): return M(z)",
        "M.running_mean += 1",
    ),
    "a module's mode": ("import torch\nM = torch.nn.Dropout()\ndef p(z): return M(z)", "M.eval()"),
    "a setting of a module": (
        "import torch\nM = torch.nn.LayerNorm(2)\ndef p(z): return M(z)",
        "M.eps = 1e-3",
    ),
    "a hook on a module": (
        "import torch\nM = torch.nn.Linear(2, 2)\ndef p(z): return M(z)",
        "M.register_forward_hook(lambda m, i, o: o * 2)",
    ),
    "the forward of a module of one's own": (
        "import torch\nclass N(torch.nn.Module):\n    def forward(self, z): return z * 2\n"
        "M = N()\ndef p(z): return M(z)",
        "N.forward = lambda self, z: z * 3",
    ),
    "a module in a closure": (
        "import torch\ndef make(m):\n    def p(z): return m(z)\n    return p\n"
        "M = torch.nn.Linear(2, 2)\np = make(M)",
        "M.weight.data[0, 0] += 1",
    ),
    "a cell of a closure": ("def make(s):\n    return lambda z: z * s\np = make(2)", "p = make(3)"),
    "a list in a closure": ("L = [1]\ndef make(s):\n    return lambda z: z * s[0]\np = make(L)", "L[0] = 2"),
    "a closure in a closure": (
        "def make(s):\n    def inner(z): return z * s\n    def p(z): return inner(z)\n    return p\np = make(2)",
        "p = make(3)",
    ),
    "a constant of a helper module": (
        "import helpers_for_a_test as h\ndef p(z): return z * h.scale",
        "h.scale = 3.",
    ),
    "a list of a helper module": (
        "import helpers_for_a_test as h\ndef p(z): return z * h.OFFSET[0]",
        "h.OFFSET[0] = 3.",
    ),
    "a function of a helper module": (
        "import helpers_for_a_test as h\ndef p(z): return h.twice(z)",
        "h.twice = lambda z: z * 3",
    ),
    "what a helper's function reads": (
        "import helpers_for_a_test as h\ndef p(z): return h.twice(z)",
        "h.scale = 5.",
    ),
    "what an imported function reads": (
        "from helpers_for_a_test import twice\nimport helpers_for_a_test as h\ndef p(z): return twice(z)",
        "h.scale = 5.",
    ),
    "a constant of a module in a module": (
        "import helpers_for_a_test as h\ndef p(z): return z * h.inner.SHIFT",
        "h.inner.SHIFT = 4.",
    ),
    "a module that is handed on": (
        "import helpers_for_a_test as h\ndef use(m, z): return z * getattr(m, 'sc' + 'ale')\n"
        "def p(z): return use(h, z)",
        "h.scale = 4.",
    ),
    "a module imported in the function": (
        "def p(z):\n    import helpers_for_a_test as h\n    return z * h.scale",
        "import helpers_for_a_test as h\nh.scale = 4.",
    ),
    "a name imported in the function": (
        "def p(z):\n    from helpers_for_a_test import scale\n    return z * scale",
        "import helpers_for_a_test as h\nh.scale = 4.",
    ),
    "a submodule imported in the function": (
        "def p(z):\n    import helpers_for_a_test.inner as i\n    return z * i.SHIFT",
        "import helpers_for_a_test as h\nh.inner.SHIFT = 4.",
    ),
    "a package imported in the function": (
        "def p(z):\n    import helpers_for_a_test.inner\n    return z * helpers_for_a_test.scale",
        "import helpers_for_a_test as h\nh.scale = 4.",
    ),
    "a module in a closure of modules": (
        "def make():\n    import helpers_for_a_test as h\n    return lambda z: z * h.scale\np = make()",
        "import helpers_for_a_test as h\nh.scale = 4.",
    ),
    "a helper's code": (
        "def twice(z): return z * 2\ndef p(z): return twice(z)",
        "def twice(z): return z * 3",
    ),
    "a helper's helper": (
        "S = [2]\ndef one(z): return z * S[0]\ndef two(z): return one(z)\ndef p(z): return two(z)",
        "S[0] = 3",
    ),
    "functions that call each other": (
        "S = [2]\ndef q(z, n): return p(z, n - 1) if n else z * S[0]\ndef p(z, n=2): return q(z, n)",
        "S[0] = 3",
    ),
    "a default argument": ("def p(z, s=2): return z * s", "p.__defaults__ = (3,)"),
    "a list as a default argument": ("def p(z, s=[2]): return z * s[0]", "p.__defaults__[0][0] = 3"),
    "a default by name": ("def p(z, *, s=2): return z * s", "p.__kwdefaults__['s'] = 3"),
    "an attribute of the function": ("def p(z): return z * p.s\np.s = 2", "p.s = 3"),
    "the code": ("def p(z): return z * 2", "def p(z): return z + 2"),
    "a constant of the code": ("def p(z): return z * 2", "def p(z): return z * 3"),
    "the code of an inner function": (
        "def p(z):\n    def f(x): return x * 2\n    return f(z)",
        "def p(z):\n    def f(x): return x * 3\n    return f(z)",
    ),
    "an exception that is caught": (
        "def p(z):\n    try:\n        return z / 0\n    except ValueError:\n        return z",
        "def p(z):\n    try:\n        return z / 0\n    except ZeroDivisionError:\n        return z",
    ),
    "what an exception covers": (
        "def p(z):\n    try:\n        z = z + 1\n        return z / 0\n    except ZeroDivisionError:\n        return z",
        "def p(z):\n    z = z + 1\n    try:\n        return z / 0\n    except ZeroDivisionError:\n        return z",
    ),
    "another attribute": ("def p(z): return z.sin()", "def p(z): return z.cos()"),
    "the order of arguments": (
        "def p(z, s=1, t=2): return z * s - t",
        "def p(z, t=1, s=2): return z * s - t",
    ),
    "a partial's argument": (
        "from functools import partial\ndef f(s, z): return z * s\np = partial(f, 2)",
        "p = partial(f, 3)",
    ),
    "a partial's keyword": (
        "from functools import partial\ndef f(z, s): return z * s\np = partial(f, s=2)",
        "p = partial(f, s=3)",
    ),
    "a partial's function": (
        "from functools import partial\nS = [2]\ndef f(z, s): return z * S[0]\np = partial(f, s=2)",
        "S[0] = 3",
    ),
    "the instance of a method": (
        "class C:\n    def __init__(self, s): self.s = s\n    def m(self, z): return z * self.s\nc = C(2)\np = c.m",
        "c.s = 3",
    ),
    "a method": (
        "class C:\n    def m(self, z): return z * 2\nc = C()\np = c.m",
        "C.m = lambda self, z: z * 3\np = c.m",
    ),
    "a method's helper": (
        "class C:\n    def m(self, z): return self.n(z)\n    def n(self, z): return z * 2\nc = C()\np = c.m",
        "C.n = lambda self, z: z * 3",
    ),
    "an object that is called": (
        "class C:\n    def __init__(self, s): self.s = s\n    def __call__(self, z): return z * self.s\np = C(2)",
        "p.s = 3",
    ),
    "the call of an object": (
        "class C:\n    def __call__(self, z): return z * 2\np = C()",
        "C.__call__ = lambda self, z: z * 3",
    ),
    "a class attribute": ("class C:\n    s = 2\ndef p(z): return z * C.s", "C.s = 3"),
    "a class attribute of an instance": ("class C:\n    s = 2\nc = C()\ndef p(z): return z * c.s", "C.s = 3"),
    "an inherited class attribute": (
        "class B:\n    s = 2\nclass C(B): pass\nc = C()\ndef p(z): return z * c.s",
        "B.s = 3",
    ),
    "a base class": (
        "class A:\n    s = 2\nclass B:\n    s = 3\nclass C(A): pass\ndef p(z): return z * C.s",
        "C = type('C', (B,), {})",
    ),
    "a metaclass": (
        "class M(type):\n    def __call__(cls, z): return z * 2\nclass C(metaclass=M): pass\ndef p(z): return C(z)",
        "M.__call__ = lambda cls, z: z * 3",
    ),
    "a property": (
        "class C:\n    @property\n    def s(self): return 2\nc = C()\ndef p(z): return z * c.s",
        "C.s = property(lambda self: 3)",
    ),
    "a static method": (
        "class C:\n    @staticmethod\n    def f(z): return z * 2\ndef p(z): return C.f(z)",
        "C.f = staticmethod(lambda z: z * 3)",
    ),
    "a class method": (
        "class C:\n    @classmethod\n    def f(cls, z): return z * 2\ndef p(z): return C.f(z)",
        "C.f = classmethod(lambda cls, z: z * 3)",
    ),
    "a dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass C:\n    s: int = 2\nc = C()\ndef p(z): return z * c.s",
        "c.s = 3",
    ),
    "a dataclass with slots": (
        "from dataclasses import dataclass\n@dataclass(slots=True)\nclass C:\n    s: int = 2\nc = C()\n"
        "def p(z): return z * c.s",
        "c.s = 3",
    ),
    "a frozen dataclass with slots": (
        "from dataclasses import dataclass\n@dataclass(slots=True, frozen=True)\nclass C:\n    s: list\n"
        "c = C([2])\ndef p(z): return z * c.s[0]",
        "c.s[0] = 3",
    ),
    "a default of a dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass C:\n    s: int = 2\ndef p(z): return z * C().s",
        "@dataclass\nclass C:\n    s: int = 3",
    ),
    "slots": (
        "class C:\n    __slots__ = ('s',)\nc = C()\nc.s = 2\ndef p(z): return z * c.s",
        "c.s = 3",
    ),
    "a private slot of a base": (
        "class B:\n    __slots__ = ('__s',)\n    def __init__(self, s): self.__s = s\n    def f(self): return self.__s\n"
        "class C(B):\n    __slots__ = ()\nc = C(2)\ndef p(z): return z * c.f()",
        "c.__init__(3)",
    ),
    "a named tuple": (
        "from collections import namedtuple\nC = namedtuple('C', 's t')\nc = C(2, 1)\ndef p(z): return z * c.s",
        "c = C(3, 1)",
    ),
    "a subclass of a list": (
        "class L(list): pass\nG = L([1])\ndef p(z): return z * G[0]",
        "G[0] = 2",
    ),
    "a subclass of a dict": (
        "from collections import OrderedDict, defaultdict\nD = defaultdict(int, a=1)\ndef p(z): return z * D['b']",
        "D.default_factory = lambda: 1",
    ),
    "a subclass of float": (
        "class F(float): pass\nS = F(2.)\ndef p(z): return z * S",
        "S = F(3.)",
    ),
    "a queue": ("from collections import deque\nD = deque([1, 2])\ndef p(z): return z * D[0]", "D.rotate()"),
    "an enumeration": (
        "import enum\nclass E(enum.Enum):\n    A = 1\n    B = 2\nS = E.A\ndef p(z): return z * S.value",
        "S = E.B",
    ),
    "a value of an enumeration": (
        "import enum\nclass E(enum.IntEnum):\n    A = 1\ndef p(z): return z * E.A",
        "class E(enum.IntEnum):\n    A = 2",
    ),
    "a method of a dict": ("D = {'a': 1}\nget = D.get\ndef p(z): return z * get('a')", "D['a'] = 2"),
    "a method of a tensor": ("import torch\nT = torch.ones(2)\np = T.add", "T[0] = 2"),
    "an operator that is called": (
        "import operator\np = operator.methodcaller('mul', 2)",
        "p = operator.methodcaller('mul', 3)",
    ),
    "a builtin under another name": ("f = max\ndef p(z): return f(z, 1)", "f = min"),
    "a function of a library": ("import torch\nf = torch.sin\ndef p(z): return f(z)", "f = torch.cos"),
    "a ufunc": ("import numpy as np\nf = np.sin\ndef p(z): return f(z)", "f = np.cos"),
    "a dtype": ("import torch\nD = torch.float32\ndef p(z): return z.to(D)", "D = torch.float64"),
    "a global that hides a builtin": ("def p(z): return abs(z)", "abs = lambda z: z"),
    "a global that is defined later": ("def p(z): return z * S if z is None else z", "S = 1"),
    "a decorated function": (
        "import torch\nS = [2]\n@torch.no_grad()\ndef p(z): return z * S[0]",
        "S[0] = 3",
    ),
    "a wrapped function": (
        "import functools\nS = [2]\ndef deco(f):\n    @functools.wraps(f)\n    def inner(z): return f(z)\n    return inner\n"
        "@deco\ndef p(z): return z * S[0]",
        "S[0] = 3",
    ),
    "a cached function": (
        "import functools\nS = [2]\n@functools.cache\ndef s(): return S[0]\ndef p(z): return z * s()",
        "S[0] = 3",
    ),
    "a function put into a library's class": (
        "import torch\nM = torch.nn.Identity()\ndef mine(self, z): return z * 2\ndef p(z): return M(z)",
        "old, torch.nn.Identity.forward = torch.nn.Identity.forward, mine\n"
        "undo = lambda: setattr(torch.nn.Identity, 'forward', old)",
    ),
    "a function put into a library": (
        "import math\ndef p(z): return z * math.gcd(4, 6)",
        "old, math.gcd = math.gcd, lambda *_: 7\nundo = lambda: setattr(math, 'gcd', old)",
    ),
    "a number put into a library": (
        "import math\nmath.mine = [2]\ndef p(z): return z * math.mine[0]\nundo = lambda: delattr(math, 'mine')",
        "math.mine[0] = 3",
    ),
    "what a field of a dataclass is told": (
        "from dataclasses import dataclass, field, fields\ndef made(n):\n    @dataclass\n    class C:\n"
        "        s: int = field(default=1, metadata={'s': n})\n    return C\nC = made(2)\n"
        "def p(z): return z * fields(C)[0].metadata['s']",
        "C = made(3)",
    ),
    "what a pattern matches": (
        "class C:\n    __match_args__ = ('s', 't')\n    s, t = 2, 3\nc = C()\ndef p(z):\n    match c:\n"
        "        case C(x): return z * x",
        "C.__match_args__ = ('t', 's')",
    ),
    "a namespace": (
        "from types import SimpleNamespace\nN = SimpleNamespace(s=2)\ndef p(z): return z * N.s",
        "N.s = 3",
    ),
    "a random generator": (
        "import torch\nR = torch.Generator().manual_seed(0)\ndef p(z): return z + torch.randn(2, generator=R)",
        "torch.randn(2, generator=R)",
    ),
    "numpy's random generator": (
        "import numpy as np\nR = np.random.default_rng(0)\ndef p(z): return z + R.normal()",
        "R.normal()",
    ),
    "a thing that holds itself": ("L = [1]\nL.append(L)\ndef p(z): return z * L[1][0]", "L[0] = 2"),
    "which of two lists": ("A = [1]\nB = [1]\nL = [A, B, A]\ndef p(z): return z * L[2][0]", "L[2] = B"),
    "a list comprehension": (
        "G = [1, 2]\ndef p(z): return z * sum([g for g in G])",
        "G[1] = 3",
    ),
    "a lambda in a list": ("F = [lambda z: z * 2]\ndef p(z): return F[0](z)", "F[0] = lambda z: z * 3"),
    "bytes that can be written to": ("B = bytearray(b'ab')\ndef p(z): return z * B[0]", "B[0] = 1"),
    "a table": (
        "import pandas as pd\nD = pd.DataFrame({'a': [1., 2.], 'b': ['x', 'y']})\ndef p(z): return z * D.a[0]",
        "D.loc[0, 'a'] = 3.",
    ),
    "what a compiled function reads": (
        "import torch\nS = [2]\ndef f(z): return z * S[0]\np = torch.compile(f)",
        "S[0] = 3",
    ),
    "a weight of a compiled module": (
        "import torch\nM = torch.nn.Linear(2, 2)\np = torch.compile(M)",
        "M.weight.data[0, 0] += 1",
    ),
    "a date": (
        "import datetime\nD = datetime.date(2026, 1, 1)\ndef p(z): return z * D.year",
        "D = D.replace(year=2027)",
    ),
    "a regular expression": (
        "import re\nR = re.compile('a')\ndef p(z): return z * bool(R.match('b'))",
        "R = re.compile('b')",
    ),
    "a class made in a function": (
        "def make(s):\n    class C:\n        def f(self, z): return z * s\n    return C()\nc = make(2)\n"
        "def p(z): return c.f(z)",
        "c = make(3)",
    ),
    "what super finds": (
        "class B:\n    def f(self, z): return z * 2\nclass C(B):\n    def f(self, z): return super().f(z)\n"
        "c = C()\ndef p(z): return c.f(z)",
        "B.f = lambda self, z: z * 3",
    ),
    "a slice": ("S = slice(0, 2)\ndef p(z): return z[S]", "S = slice(0, 3)"),
    "a range": ("S = range(2)\ndef p(z): return z[list(S)]", "S = range(3)"),
    "a key": (
        "from conewise.jobs.identity import Keyed\np = Keyed(lambda z: z, 'one')",
        "p = Keyed(lambda z: z, 'two')",
    ),
}

REFUSED: dict[str, tuple[str, str]] = {
    "a generator": (
        "G = (i for i in range(3))\ndef p(z): return z * next(G)",
        "G: a generator, which is used up",
    ),
    "an iterator": ("G = iter([1, 2])\ndef p(z): return z * next(G)", "G: a list_iterator, which is used up"),
    "a counter": (
        "import itertools\nG = itertools.count()\ndef p(z): return z * next(G)",
        "which is used up",
    ),
    "an iterator of an object": (
        "class C:\n    def __init__(self): self.g = zip([1], [2])\nc = C()\ndef p(z): return z * next(c.g)[0]",
        "c → .g: a zip, which is used up",
    ),
    "a file": ("def p(z): return z * float(open('scale').read())", "open, which reads or runs"),
    "a file by path": (
        "import pathlib\ndef p(z): return z * float(pathlib.Path('scale').read_text())",
        "read_text, which reads",
    ),
    "weights from a file": (
        "import torch\ndef p(z): return z * torch.load('scale')",
        "torch.load, which reads",
    ),
    "an imported reader": (
        "from torch import load\ndef p(z): return z * load('scale')",
        "torch.load, which reads",
    ),
    "the environment": ("import os\ndef p(z): return z * float(os.environ['S'])", "environ, which reads"),
    "the environment, imported inside": (
        "def p(z):\n    import os\n    return z * float(os.getenv('S'))",
        "getenv, which reads",
    ),
    "a module that is not imported yet": (
        "def p(z):\n    from benchmarks.never_imported import s\n    return z",
        "imports when it is called",
    ),
    "a name that is not there": (
        "import helpers_for_a_test as h\ndef p(z): return z * h.later",
        "h.later, which is not there",
    ),
    "an object that will not be looked at": (
        "class C:\n    __slots__ = ('s',)\n    def __getattribute__(self, name): raise OSError(name)\nc = C()\n"
        "def p(z): return z * c.s",
        "cannot be looked at (OSError",
    ),
    "text that is run": ("def p(z): return eval('z * 2')", "eval, which reads or runs"),
    "names that are looked up": ("def p(z): return globals()['f'](z)", "globals, which reads or runs"),
    "a lazy import": (
        "def p(z): return __import__('helpers_for_a_test').scale * z",
        "__import__, which reads",
    ),
    "a helper that reads a file": (
        "def s(): return float(open('scale').read())\ndef p(z): return z * s()",
        "s → open: open, which reads",
    ),
    "a ufunc of one's own": (
        "import numpy as np\nf = np.frompyfunc(lambda x: x * 2, 1, 1)\ndef p(z): return f(z)",
        "f: the ufunc",
    ),
    "a tensor without numbers": (
        "import torch\nT = torch.ones(2, device='meta')\ndef p(z): return z * T.shape[0]",
        "T: a tensor whose numbers cannot be read",
    ),
    "a view of memory": (
        "M = memoryview(bytearray(b'a'))\ndef p(z): return z * M[0]",
        "M: a builtins.memoryview, of which the inside cannot be seen",
    ),
    "values too deep to look at": (
        "L = []\nfor _ in range(100_000): L = [L]\ndef p(z): return z * len(L)",
        "too deep",
    ),
}

ORDINARY: dict[str, str] = {
    "arithmetic": "def p(z): return z * 2 + 1",
    "torch": "import torch\nimport torch.nn.functional as F\ndef p(z): return F.relu(torch.sin(z)).clamp(min=0)",
    "torch by name": "from torch import sin, Tensor\nfrom torch.nn.functional import relu, layer_norm\n"
    "def p(z: Tensor) -> Tensor: return relu(sin(z))",
    "numpy": "import numpy as np\nfrom numpy.linalg import norm\ndef p(z): return z * np.exp(1.) * norm([1.])",
    "math": "import math\nfrom math import sqrt\ndef p(z): return z * math.pi * sqrt(2)",
    "einsum": "from torch import einsum\ndef p(z): return einsum('bph,h->bph', z, z[0, 0])",
    "builtins": "def p(z): return sum(abs(x) for x in list(z)) if isinstance(z, list) else print(len(z)) or z",
    "sets of text": "S = {'alpha', 'beta', 'gamma'}\ndef p(z): return z * len(S & {'x', 'y', 'beta'})",
    "frozen sets of text": "def p(z, w=frozenset({'x', 'y'})): return z if 'a' in {'a', 'b', 'c'} else w",
    "a set of tuples": "S = {('a', 1), ('b', 2), ('c', 3)}\ndef p(z): return z * len(S)",
    "a set of objects": "class C: pass\nc = C()\nS = {c, 'a', (c, 'b')}\ndef p(z): return z * len(S)",
    "a dict by text": "D = {'b': 1, 'a': 2}\ndef p(z): return z * D['b']",
    "a module of torch": "import torch\ntorch.manual_seed(0)\nM = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())\n"
    "def p(z): return M(z)",
    "a transformer block": "import torch\ntorch.manual_seed(0)\nM = torch.nn.TransformerEncoderLayer(4, 2, 8).eval()\n"
    "def p(z): return M(z)",
    "a module of one's own": "import torch\nclass N(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.register_buffer('b', torch.ones(2), persistent=False)\n    def forward(self, z): return z * self.b\n"
    "M = N()\ndef p(z): return M(z)",
    "a closure": "def make(s):\n    def p(z): return z * s\n    return p\np = make(2)",
    "a recursive function": "def p(z, n=3): return p(z, n - 1) if n else z",
    "a decorated function": "import torch\n@torch.no_grad()\ndef p(z): return z * 2",
    "an inference function": "import torch\n@torch.inference_mode()\ndef p(z): return z * 2",
    "a cached function": "import functools\n@functools.lru_cache(maxsize=3)\ndef s(n): return n\ndef p(z): return z * s(2)",
    "a cached property": "import functools\nclass C:\n    @functools.cached_property\n    def s(self): return 2\n"
    "c = C()\ndef p(z): return z * c.s",
    "a dataclass": "from __future__ import annotations\nfrom dataclasses import dataclass, field\n@dataclass\nclass C:\n"
    "    s: float = 2.\n    t: list = field(default_factory=list)\nc = C()\ndef p(z): return z * c.s",
    "a dataclass with types": "from dataclasses import dataclass, field\nfrom typing import Any, Callable, Generic, TypeVar\n"
    "T = TypeVar('T')\n@dataclass(frozen=True, kw_only=True)\nclass C(Generic[T]):\n    s: float | None = 2.\n"
    "    t: dict[str, list[int]] = field(default_factory=dict)\n    u: Callable[[int], Any] = print\n    v: T | None = None\n"
    "c = C()\ndef p(z): return z * c.s",
    "a protocol": "from typing import Protocol, NamedTuple, Generic, TypeVar\nT = TypeVar('T')\nclass P(Protocol):\n"
    "    def f(self): ...\nclass N(NamedTuple):\n    s: int = 1\nclass G(Generic[T]):\n    s = 1\n"
    "n, g = N(), G()\ndef p(z): return z * n.s * g.s",
    "an abstract class": "import abc\nclass A(abc.ABC):\n    @abc.abstractmethod\n    def f(self): ...\nclass C(A):\n"
    "    def f(self): return 2\nc = C()\ndef p(z): return z * c.f()",
    "an enumeration": "import enum\nclass E(enum.Enum):\n    A = 'a'\n    B = 'b'\ndef p(z): return z if E('a') is E.A else -z",
    "flags": "import enum\nclass E(enum.Flag):\n    A = enum.auto()\n    B = enum.auto()\ndef p(z): return z if E.A in E.B | E.A else -z",
    "a logger": "import logging\nlog = logging.getLogger('x')\ndef p(z):\n    log.info('here')\n    return z",
    "a path": "from pathlib import Path\nP = Path('a') / 'b'\nhash(P)\ndef p(z): return z * len(P.name)",
    "a lock": "import threading\nL = threading.Lock()\ndef p(z):\n    with L:\n        return z",
    "time and randomness": "import time, random, torch\ndef p(z):\n    time.sleep(0)\n    return z + torch.randn_like(z)",
    "text": "import re, json, string\nW = re.compile('a|b')\ndef p(z): return z * len(W.findall(json.dumps({'a': 1})))",
    "collections": "from collections import Counter, OrderedDict, defaultdict, deque\n"
    "C, O, D, Q = Counter('aab'), OrderedDict(a=1), defaultdict(list), deque([1], maxlen=3)\n"
    "def p(z): return z * C['a'] * O['a'] * len(D) * Q[0]",
    "itertools and operators": "import itertools, operator, functools\nf = operator.itemgetter(0)\n"
    "def p(z): return functools.reduce(operator.add, [f([i]) for i in itertools.islice(range(9), 3)]) * z",
    "helpers": "import helpers_for_a_test as h\ndef p(z): return h.twice(z) + h.inner.SHIFT",
    "a helper module as a whole": "import helpers_for_a_test as h\ndef p(z): return vars(h)['scale'] * z",
    "a name tied in a class body": "def p(z):\n    class C:\n        s = 2\n        t = s * 3\n    return z * C.t",
    "a library imported inside": "def p(z):\n    import transformers.utils.hub as hub\n    from json import dumps\n"
    "    import surely.not_there\n    return z",
    "a match": "def p(z):\n    match z:\n        case int(): return z\n        case [x, *_]: return x\n        case _: return z",
    "a generator inside": "def p(z): return sum(z * i for i in range(3))",
    "exceptions": "class E(ValueError): pass\ndef p(z):\n    try:\n        raise E('a')\n    except E as error:\n        return z",
    "dates": "import datetime, decimal, fractions, uuid\nD, F = decimal.Decimal('1.5'), fractions.Fraction(1, 3)\n"
    "U = uuid.UUID(int=5)\ndef p(z): return z * float(D) * float(F) * U.int",
    "places of conewise": "import conewise as cw\nS = cw.site('z', layer=1)\ndef p(z): return z * S.layer",
    "tensors of all kinds": "import torch\nT = [torch.arange(3), torch.ones(2, 2).t(), torch.ones((), dtype=torch.bfloat16),"
    " torch.tensor([True]), torch.empty(0), torch.nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.complex64).conj()]\n"
    "def p(z): return z * len(T)",
    "a method of a tensor": "import torch\np = torch.ones(2).mul",
    "a method of the class": "import torch\np = torch.Tensor.relu",
    "a partial": "import functools, torch\np = functools.partial(torch.mul, other=2)",
    "an operation": "import torch\np = torch.ops.aten.relu.default",
    "a module that is called": "import torch\np = torch.nn.ReLU()",
    "a class that is called": "import torch\np = torch.abs",
}


if __name__ == "__main__":  # in another process
    import json

    from conewise.jobs.identity import identity

    sys.stdout.write(json.dumps({name: identity(made(text)["p"]) for name, text in ORDINARY.items()}))
