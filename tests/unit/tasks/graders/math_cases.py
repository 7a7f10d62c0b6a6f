r"""Answers that a mathematics teacher has to judge: what each data set's gold answer
accepts and what it does not.

The tables below are grouped by kind. In each of them

    gold   85√3                     is a data set's answer, as GSM8K, MATH, AIME, DAPO,
                                    Omni-MATH, … write them,
    right  85\sqrt{3} ¦ √3 · 85     are answers that a teacher accepts for it,
    wrong  85 ¦ 85\sqrt{2}          are answers that she does not: near misses, and
                                    numbers out of a larger expression.

`¦` separates answers and `⏎` stands for a line break. BOXED has the contents of a
`\boxed{…}`; WRITTEN has whole answers, with the words around them. What teachers might
judge differently is left out.
"""

from typing import NamedTuple


class Case(NamedTuple):
    """One answer, the gold answer that it is held against, and whether it is right."""

    answer: str
    gold: str
    right: bool


BOXED: dict[str, str] = {
    "numbers": (
        r"""
gold   72
right  72.0 ¦ 72. ¦ \text{72} ¦ \mathbf{72} ¦ +72 ¦ \frac{144}{2} ¦ {72} ¦ 72.00 ¦ n = 72
wrong  27 ¦ 720 ¦ 7.2 ¦ -72 ¦ 71 ¦ \frac{72}{2} ¦ 72! ¦ 72x ¦ 72,000 ¦ 7^2 ¦ 72 + x ¦ 72/73
gold   025
right  25 ¦ 025 ¦ 25.0 ¦ \text{025}
wrong  0.25 ¦ 52 ¦ 250 ¦ 205
gold   1080
right  1{,}080 ¦ 1,\!080 ¦ 1\,080 ¦ 1080.00 ¦ 1,080
wrong  1.080 ¦ 108 ¦ 1,080,000 ¦ 1080! ¦ 1{,}081 ¦ 1 ¦ 80
gold   10,\!080
right  10080 ¦ 10,080 ¦ 10,\!080 ¦ 10{,}080
wrong  10 ¦ 80 ¦ 10.080 ¦ 10,\!008 ¦ 1080
gold   11,111,111,100
right  11111111100 ¦ 11{,}111{,}111{,}100
wrong  11 ¦ 11,111,111 ¦ 1111111110 ¦ 100
gold   -13
right  -13 ¦ -13.0 ¦ −13 ¦ {-13} ¦ (-13) ¦ x=-13
wrong  13 ¦ -31 ¦ -1.3 ¦ -13x ¦ -12 ¦ \pm 13
gold   0
right  0.0 ¦ 0.00 ¦ \frac{0}{7} ¦ x = 0
wrong  1 ¦ \emptyset ¦ 0.1 ¦ 10 ¦ \{\}
gold   3.14
right  3.140 ¦ \frac{157}{50} ¦ 314/100
wrong  3.1 ¦ 3.141 ¦ 31.4 ¦ \pi ¦ 3 ¦ 14
gold   .0625
right  0.0625 ¦ \frac{1}{16} ¦ .0625
wrong  0.625 ¦ 625 ¦ .06 ¦ \frac{1}{6}
gold   1e5
right  100000 ¦ 1e5 ¦ 10^5 ¦ 1 \times 10^5 ¦ 100,000 ¦ 1E5
wrong  5 ¦ 1 ¦ 5e ¦ 1e4 ¦ 15 ¦ 10^{-5} ¦ e^5 ¦ 5e^1
gold   1e-07
right  1e-7 ¦ 0.0000001 ¦ 10^{-7} ¦ 1e-07
wrong  7 ¦ -7 ¦ 1e-06 ¦ 1e7 ¦ 1 ¦ 0
gold   2.5E3
right  2500 ¦ 2.5e3 ¦ 2.5 \times 10^3 ¦ 2.5 \cdot 10^{3}
wrong  2.5 ¦ 250 ¦ 2.5e ¦ 3 ¦ 7.5
gold   6.02 \times 10^{23}
right  6.02 \cdot 10^{23} ¦ 602 \times 10^{21} ¦ 6.02×10^{23}
wrong  6.02 ¦ 6.02 \times 10^{22} ¦ 6.02 \times 10 ¦ 23 ¦ 6.20 \times 10^{23}
gold   3^{2001}
right  3^{2001} ¦ 3 \cdot 3^{2000} ¦ 9 \cdot 3^{1999}
wrong  3 ¦ 2001 ¦ 3^{2000} ¦ 3 \cdot 2001 ¦ 2001^3
gold   8!
right  40320 ¦ 8 \cdot 7! ¦ 40{,}320
wrong  8 ¦ 7! ¦ 40302 ¦ 8!!
gold   5
right  \lfloor 5.5 \rfloor ¦ \left\lceil 4.2 \right\rceil ¦ 5 = \sqrt{25}
wrong  \neq 5 ¦ > 5 ¦ < 5 ¦ \ge 5 ¦ 7 \to 5 ¦ 5 \to 7 ¦ 10 \mid 5 ¦ 5 \mid 10 ¦ \foo{3} 5 ¦ \not= 5
wrong  5 \text{ or } 6 ¦ 5, \ldots ¦ 5 \neq 5 ¦ 6 = 5 ¦ \frac{5} ¦ 5 + ¦ 5 = 6 ¦ 5^ ¦ 5 \pm 1 ¦ 5/
"""
    ),
    "fractions": (
        r"""
gold   \frac{3}{56}
right  3/56 ¦ \dfrac{3}{56} ¦ \frac{6}{112} ¦ \tfrac{3}{56} ¦ \frac3{56} ¦ {3}/{56}
right  p = \frac{3}{56}
wrong  \frac{56}{3} ¦ 3 ¦ 56 ¦ \frac{3}{65} ¦ -\frac{3}{56} ¦ 0.05 ¦ \frac{3}{5}6 ¦ 3, 56
gold   -\frac{35}{9}
right  -35/9 ¦ \frac{-35}{9} ¦ -\dfrac{35}{9} ¦ \frac{35}{-9} ¦ -3\frac{8}{9} ¦ −\frac{35}{9}
wrong  \frac{35}{9} ¦ -\frac{9}{35} ¦ -35 ¦ -3.89 ¦ -\frac{35}{3} ¦ \frac{-35}{-9}
gold   \frac 34
right  0.75 ¦ \frac{3}{4} ¦ \frac34 ¦ 3/4 ¦ \frac{75}{100}
wrong  3 ¦ 4 ¦ 34 ¦ \frac43 ¦ 7.5 ¦ \frac{3}{4}x
gold   $\frac{11}{15}$
right  \frac{11}{15} ¦ 11/15 ¦ \frac{22}{30}
wrong  11 ¦ 15 ¦ \frac{1}{15} ¦ \frac{15}{11} ¦ 0.73
gold   1\frac{4}{5}
right  1.8 ¦ 9/5 ¦ \frac95 ¦ 1\frac45 ¦ 1 \frac{4}{5} ¦ 1\dfrac{4}{5} ¦ 1 4/5
wrong  1 ¦ \frac45 ¦ 1\frac54 ¦ \frac{14}{5} ¦ 1 \cdot \frac45 ¦ 0.8 ¦ 2\frac45 ¦ 1 + 4/6
gold   -2\frac{1}{2}
right  -2.5 ¦ -\frac52 ¦ -5/2 ¦ -2 \frac12
wrong  -1.5 ¦ 2.5 ¦ -2 ¦ -\frac12 ¦ -1 ¦ -\frac32
gold   33 1/3
right  \frac{100}{3} ¦ 33\frac13 ¦ 33\frac{1}{3} ¦ 100/3
wrong  33 ¦ 11 ¦ 331/3 ¦ 33.3 ¦ 1/3
gold   \frac{1}{3}
right  0.\overline{3} ¦ 0.\dot{3} ¦ 0.\bar{3} ¦ 0.\overline{33}
wrong  0.3 ¦ 0.33 ¦ 3 ¦ 0.\overline{4} ¦ .\overline{03}
gold   0.\overline{428571}
right  \frac37 ¦ 3/7 ¦ 0.\overline{428571} ¦ \frac{3}{7}
wrong  0.428571 ¦ 0.\overline{428517} ¦ 0.43 ¦ 0.4\overline{28571} ¦ 0 ¦ \frac{4}{7}
gold   0.1\overline{6}
right  1/6 ¦ \frac16 ¦ 0.1\bar{6} ¦ 0.1\overline{6}
wrong  0.16 ¦ 0.\overline{16} ¦ 0.1 ¦ 1.6 ¦ 0.6
"""
    ),
    "golds of which one number could be read": (
        r"""
gold   2√3
right  2\sqrt{3} ¦ 2√3 ¦ \sqrt{12} ¦ 2\sqrt3 ¦ 2 \cdot \sqrt{3}
wrong  2 ¦ 3 ¦ 23 ¦ \sqrt{3} ¦ 6 ¦ 3\sqrt{2} ¦ 2+\sqrt3 ¦ 2\sqrt{5} ¦ 3.46
gold   85√3
right  85√3 ¦ 85\sqrt{3} ¦ \sqrt{3} \cdot 85
wrong  85 ¦ 85\sqrt{2} ¦ 3 ¦ 853 ¦ \sqrt{85} ¦ 255
gold   √2
right  \sqrt{2} ¦ √2 ¦ \frac{2}{\sqrt2} ¦ 2^{1/2}
wrong  2 ¦ \sqrt{3} ¦ 1.414 ¦ -\sqrt2 ¦ \frac{1}{\sqrt2}
gold   (1+√5)/2
right  \frac{1+\sqrt5}{2} ¦ (1+√5)/2 ¦ \frac12 + \frac{\sqrt5}{2} ¦ \frac{\sqrt{5}+1}{2}
wrong  1 ¦ 5 ¦ 2 ¦ \frac{1-\sqrt5}{2} ¦ 1+\frac{\sqrt5}{2} ¦ 1.618 ¦ 1/2
gold   5²
right  25 ¦ 5^2 ¦ 5² ¦ 5 \cdot 5
wrong  5 ¦ 2 ¦ 52 ¦ 10 ¦ 5^3 ¦ 2^5
gold   10⁶
right  1000000 ¦ 10^6 ¦ 10⁶ ¦ 1,000,000 ¦ 10^{6}
wrong  10 ¦ 6 ¦ 16 ¦ 60 ¦ 106 ¦ 10^5 ¦ 100000
gold   1½
right  1.5 ¦ 1\frac12 ¦ \frac32 ¦ 3/2 ¦ 1½
wrong  1 ¦ 2 ¦ 0.5 ¦ 11/2 ¦ ½ ¦ 12
gold   3¾
right  3.75 ¦ \frac{15}{4} ¦ 3\frac{3}{4}
wrong  3 ¦ \frac94 ¦ 34 ¦ ¾ ¦ 3.5
gold   3·4
right  12 ¦ 3 \cdot 4 ¦ 3·4
wrong  3 ¦ 4 ¦ 34 ¦ 7 ¦ 3.4
gold   5×10³
right  5000 ¦ 5 \times 10^3 ¦ 5×10³ ¦ 5,000
wrong  5 ¦ 10 ¦ 50 ¦ 500 ¦ 5103
gold   log₂ 3
right  \log_2 3 ¦ \frac{\ln 3}{\ln 2} ¦ log₂ 3 ¦ \log_{2}(3) ¦ \frac{\log 3}{\log 2}
wrong  3 ¦ 2 ¦ 23 ¦ \log_3 2 ¦ \log_2 5 ¦ 1.58 ¦ \frac32
gold   2 \text{ red and } 3 \text{ blue}
right  2 \text{ red and } 3 \text{ blue} ¦ 2\text{ red and }3\text{ blue}
wrong  2 ¦ 3 ¦ 5 ¦ 3 \text{ red and } 2 \text{ blue} ¦ 2 \text{ red} ¦ 23
gold   1, 2, \ldots, n
right  1, 2, \ldots, n ¦ 1,2,\ldots,n
wrong  1, 3, 5, \ldots, 2n-1 ¦ 1 ¦ n ¦ 2 ¦ 1, 2 ¦ 1, 2, \ldots, n-1 ¦ 1, 2, \ldots, 2n
gold   \{2, 4, 6, \ldots\}
wrong  2 ¦ \{2, 4, 6\} ¦ \{1, 3, 5, \ldots\} ¦ 6 ¦ \{2, 4, 8, \ldots\}
gold   (k, 2k), k \in \mathbb{Z}
right  (k, 2k), k \in \mathbb{Z} ¦ (k,2k), k\in\mathbb{Z}
wrong  2 ¦ k ¦ (2k, k), k \in \mathbb{Z} ¦ (1,2) ¦ (k, 3k), k \in \mathbb{Z} ¦ (2, 4)
gold   all integers n \ge 3
right  all integers n \ge 3 ¦ \text{all integers } n \ge 3
wrong  3 ¦ n ¦ \text{all integers} ¦ \text{all integers } n \ge 4 ¦ \text{all integers } n \le 3
"""
    ),
    "broken golds": (
        r"""
gold   see figure
right  see figure ¦ \text{see figure}
wrong  5 ¦ figure ¦ 0 ¦ see
gold   ((((
wrong  5 ¦ ( ¦ )))) ¦ 0 ¦ ((5
gold   \frac{}{}
wrong  0 ¦ 1 ¦ \frac{1}{1} ¦ \frac{0}{0} ¦ \frac{1}{2}
gold   \sqrt{
wrong  0 ¦ 1 ¦ \sqrt{2} ¦ \sqrt{}
"""
    ),
    "expressions": (
        r"""
gold   x^2-2x+1
right  (x-1)^2 ¦ 1-2x+x^2 ¦ x(x-2)+1 ¦ \left(1-x\right)^2 ¦ x^{2}-2x+1 ¦ x²-2x+1 ¦ (x-1)(x-1)
wrong  x^2+2x+1 ¦ x^2-2x ¦ x^2-2x-1 ¦ 1 ¦ x-1 ¦ y^2-2y+1 ¦ x^3-2x+1 ¦ 2 ¦ x^2-2x+2
gold   (x+1)(x+2)(x+3)
right  (x+3)(x+2)(x+1) ¦ (x^2+3x+2)(x+3) ¦ (1+x)(2+x)(3+x)
wrong  (x+1)(x+2) ¦ (x-1)(x-2)(x-3) ¦ (x+1)(x+2)(x+4) ¦ 6 ¦ x^3+6
gold   2^{n-1}
right  \frac{2^n}{2} ¦ 2^n/2 ¦ \frac12 \cdot 2^n ¦ 2^{n-1} ¦ 2^{-1+n}
wrong  2^n ¦ 2^{n+1} ¦ 2^n-1 ¦ 2 ¦ 2^{1-n} ¦ (n-1)^2 ¦ 2n-1
gold   \frac{n(n+1)}{2}
right  \binom{n+1}{2} ¦ \frac{n^2+n}{2} ¦ n(n+1)/2 ¦ \frac{1}{2}n(n+1) ¦ \dfrac{(n+1)n}{2}
wrong  \frac{n(n-1)}{2} ¦ n(n+1) ¦ \frac{n+1}{2} ¦ 2 ¦ \frac{m(m+1)}{2} ¦ n
gold   \binom{2n}{n}
right  \binom{2n}{n} ¦ \frac{(2n)!}{n!n!} ¦ \frac{(2n)!}{(n!)^2} ¦ \dbinom{2n}{n}
wrong  \binom{n}{2n} ¦ \binom{2n}{2} ¦ \binom{2n}{n-1} ¦ 2n ¦ \frac{2n}{n} ¦ \frac{(2n)!}{n!}
gold   \left\lfloor \frac{n}{2} \right\rfloor
right  \lfloor n/2 \rfloor ¦ \left\lfloor\frac n2\right\rfloor ¦ \lfloor \frac{n}{2} \rfloor
wrong  \left\lceil \frac{n}{2} \right\rceil ¦ \frac{n}{2} ¦ \lfloor \frac{n}{3} \rfloor ¦ n ¦ 2
gold   n^2 - n + 1
right  1 - n + n^2 ¦ n(n-1)+1 ¦ n^2-n+1
wrong  n^2 + n + 1 ¦ n^2 - n ¦ 1 ¦ n^2 - n - 1 ¦ n(n+1)-1
gold   \frac{1}{2} \ln 3
right  \ln\sqrt3 ¦ \frac{\ln 3}{2} ¦ 0.5\ln 3 ¦ \frac12\ln(3) ¦ \ln(\sqrt{3})
wrong  \ln 3 ¦ \frac12 ¦ 3 ¦ \ln\frac32 ¦ \frac12 \ln 2 ¦ -\frac12\ln 3
gold   \sin x \cos x
right  \frac12\sin 2x ¦ \cos x \sin x ¦ \frac{\sin(2x)}{2} ¦ \sin(x)\cos(x)
wrong  \sin 2x ¦ \sin x ¦ \sin x + \cos x ¦ \cos x ¦ \sin^2 x ¦ \sin y \cos y
gold   \tan x
right  \frac{\sin x}{\cos x} ¦ \tan(x) ¦ \tan{x}
wrong  \cot x ¦ \tan y ¦ \frac{\cos x}{\sin x} ¦ x ¦ \tan 2x
gold   9\pi
right  9π ¦ 9 \pi ¦ \pi \cdot 9 ¦ 9\pi \text{ cm}^2 ¦ 9{\pi} ¦ 9\cdot\pi
wrong  9 ¦ \pi ¦ 9\pi^2 ¦ 28.27 ¦ 3\pi ¦ \frac{9}{\pi} ¦ 9 + \pi
gold   \pi - 2
right  π-2 ¦ -2+\pi ¦ \pi-2
wrong  2-\pi ¦ \pi ¦ -2 ¦ \pi+2 ¦ 1.14 ¦ 2\pi
gold   \frac{\sqrt{3}}{3}
right  1/√3 ¦ \frac{1}{\sqrt3} ¦ \sqrt{\frac13} ¦ \frac{\sqrt3}3 ¦ \sqrt{3}/3
wrong  \sqrt3 ¦ \frac{\sqrt3}{2} ¦ \frac13 ¦ 0.577 ¦ \frac{3}{\sqrt3} ¦ \frac{\sqrt{2}}{3}
gold   11\sqrt2
right  11\sqrt{2} ¦ 11√2 ¦ \sqrt{242} ¦ 11 \sqrt 2
wrong  11 ¦ \sqrt{2} ¦ 22 ¦ 2\sqrt{11} ¦ 11\sqrt3 ¦ 112
gold   \sqrt[3]{4}
right  4^{1/3} ¦ 2^{2/3} ¦ \sqrt[3]{4} ¦ 4^{\frac13}
wrong  \sqrt{4} ¦ 3 ¦ 4 ¦ \sqrt[4]{3} ¦ 3\sqrt{4} ¦ \sqrt[3]{2}
gold   3R^2
right  3R^{2} ¦ 3 \cdot R^2 ¦ 3R \cdot R ¦ 3R²
wrong  3 ¦ R^2 ¦ 3R ¦ 9R^2 ¦ 3R^3 ¦ 32
gold   pi/4
right  \frac{\pi}{4} ¦ π/4 ¦ 0.25\pi ¦ \pi/4
wrong  4 ¦ \pi ¦ π/2 ¦ \frac{4}{\pi} ¦ 0.785 ¦ 1/4
gold   exp(2)
right  e^2 ¦ e^{2} ¦ \exp(2) ¦ \mathrm{e}^2
wrong  2 ¦ e ¦ \exp(3) ¦ 2e ¦ e^{-2} ¦ 7.39
gold   sqrt(3)
right  \sqrt3 ¦ √3 ¦ 3^{1/2} ¦ \sqrt{3}
wrong  3 ¦ \sqrt2 ¦ 1.732 ¦ -\sqrt{3}
gold   3/(2n+1)
right  \frac{3}{2n+1} ¦ \frac{6}{4n+2} ¦ \frac{3}{1+2n}
wrong  3 ¦ \frac{3}{2n} ¦ \frac{3}{2}n+1 ¦ \frac{2n+1}{3} ¦ \frac{3}{2n-1}
gold   \alpha + \beta
right  α+β ¦ \beta + \alpha
wrong  \alpha - \beta ¦ \alpha ¦ a + b ¦ 2\alpha
gold   x_1 + x_2
right  x_2 + x_1 ¦ x_{1}+x_{2}
wrong  x_1 ¦ x_1 - x_2 ¦ x_1 x_2 ¦ 3 ¦ 2x
gold   \log_{10} 2
right  \log_{10}(2) ¦ \frac{\ln 2}{\ln 10}
wrong  2 ¦ 10 ¦ \log_2 10 ¦ 0.301 ¦ \ln 2
"""
    ),
    "letters that are also units": (
        r"""
gold   3t
right  t \cdot 3 ¦ 3t ¦ 3{t}
wrong  3 ¦ t ¦ 3x ¦ t^3 ¦ 3+t ¦ 3t+1 ¦ 3s ¦ 4t
gold   x+3t
right  3t+x ¦ x+3t
wrong  x+3 ¦ x ¦ 3t ¦ x-3t ¦ x+3s ¦ x+t
gold   3 - t
right  -t+3 ¦ 3-t
wrong  3 ¦ -t ¦ t-3 ¦ 3+t ¦ 3-s
gold   2m
right  m+m ¦ 2\cdot m
wrong  2 ¦ m ¦ m^2 ¦ 2n ¦ 2m+1 ¦ 3m
gold   12d
right  12d ¦ d \cdot 12
wrong  12 ¦ 12c ¦ d ¦ 13d ¦ \frac{12}{d}
gold   4g^2
right  (2g)^2 ¦ 4g^{2}
wrong  4 ¦ 4g ¦ g^2 ¦ 16 ¦ 4h^2
gold   \frac{m}{2}
right  m/2 ¦ \frac12 m ¦ 0.5m
wrong  \frac12 ¦ m ¦ \frac{2}{m} ¦ 2 ¦ \frac{n}{2}
gold   \frac{1}{2}gt^2
right  \frac{gt^2}{2} ¦ 0.5gt^2 ¦ \frac12 t^2 g
wrong  \frac12 ¦ \frac12 g ¦ \frac12 t^2 ¦ gt^2 ¦ \frac12 gt ¦ \frac13 gt^2
gold   2l + 2w
right  2(l+w) ¦ 2w+2l
wrong  2 + 2w ¦ 2l ¦ 2w ¦ 4 ¦ l+w ¦ 2lw
gold   5s - 2
right  -2+5s ¦ 5s-2
wrong  5-2 ¦ 3 ¦ 5s ¦ 5s+2 ¦ -2
gold   c + h
right  h + c
wrong  c ¦ h ¦ c - h ¦ ch ¦ 2c
gold   a + 2d
right  2d+a
wrong  a + 2 ¦ a ¦ 2d ¦ a+d ¦ a - 2d ¦ 3a
"""
    ),
    "complex numbers": (
        r"""
gold   2i
right  (1+i)^2 ¦ 2i ¦ 2\mathrm{i} ¦ i \cdot 2 ¦ \frac{-2}{i}
wrong  2 ¦ i ¦ -2i ¦ 2i+1 ¦ 2x ¦ (1-i)^2
gold   -1
right  e^{i\pi} ¦ i^2 ¦ \cos\pi ¦ i \cdot i
wrong  1 ¦ i ¦ i^4 ¦ -i ¦ e^{i} ¦ e^{2i\pi}
gold   5
right  |3+4i| ¦ \left|3-4i\right| ¦ \sqrt{25} ¦ (2+i)(2-i)
wrong  |3+5i| ¦ 3+4i ¦ 5i ¦ 5+i ¦ (2+i)^2
gold   6-5i
right  -5i+6 ¦ 6-5\mathrm{i} ¦ 6 - 5i ¦ 6+(-5)i ¦ z = 6-5i
wrong  6+5i ¦ 6 ¦ -5i ¦ 5-6i ¦ 6-5 ¦ -6-5i ¦ 6-5x
gold   \frac{1}{2}+\frac{\sqrt{3}}{2}i
right  e^{i\pi/3} ¦ \frac{1+i\sqrt3}{2} ¦ \frac12 + \frac{i\sqrt3}{2}
right  \frac{1}{2}+\frac{\sqrt{3}i}{2}
wrong  \frac12-\frac{\sqrt3}{2}i ¦ \frac12 ¦ \frac{1+\sqrt3}{2} ¦ \frac{\sqrt3}{2}+\frac12 i
wrong  e^{i\pi/6}
gold   -i
right  \frac{1}{i} ¦ i^3 ¦ 0 - i
wrong  i ¦ -1 ¦ 1 ¦ -2i ¦ 1 - i
"""
    ),
    "tuples": (
        r"""
gold   (3,-2)
right  \left(3, -2\right) ¦ ( 3 , -2 ) ¦ (3.0,-2) ¦ (x,y)=(3,-2) ¦ (3,−2) ¦ (3,\, -2) ¦ P = (3,-2)
wrong  (-2,3) ¦ (3,2) ¦ (-3,-2) ¦ 3 ¦ (3,-2,0) ¦ 1 ¦ -6 ¦ -2 ¦ (3) ¦ (2,-3) ¦ (3-2)
gold   \left( 3, \frac{\pi}{2} \right)
right  (3,π/2) ¦ (3,\frac{\pi}{2}) ¦ \left(3,\tfrac{\pi}{2}\right) ¦ (3, 0.5\pi)
wrong  (\frac{\pi}{2},3) ¦ (3,\pi) ¦ 3 ¦ (3,\frac{3\pi}{2}) ¦ (3,1.57) ¦ (3,2) ¦ (\frac{\pi}{2})
gold   (6,31,-1)
right  (6, 31, -1) ¦ (x,y,z) = (6,31,-1)
wrong  (6,31) ¦ (31,6,-1) ¦ (6,31,1) ¦ 6 ¦ 36 ¦ (6,31,-1,0) ¦ (6,13,-1)
gold   (p, q, r) = (7, 3, 2)
right  (7,3,2) ¦ (p,q,r)=(7,3,2) ¦ \left(7,3,2\right)
wrong  (3,7,2) ¦ (7,3) ¦ 7 ¦ (p,q,r)=(7,2,3) ¦ (7,3,2), (3,7,2) ¦ 12
gold   (1,1), (2,3)
right  (2,3), (1,1) ¦ (1,1) \text{ and } (2,3) ¦ \{(1,1),(2,3)\} ¦ (1,1),(2,3)
wrong  (1,1) ¦ (1,1), (3,2) ¦ (1,2), (1,3) ¦ (1,1), (2,3), (3,4) ¦ 1,1,2,3 ¦ (1,1,2,3) ¦ (2,3)
gold   \langle 1,2,3\rangle
right  \langle 1, 2, 3 \rangle ¦ \left\langle 1,2,3 \right\rangle ¦ ⟨1,2,3⟩
wrong  \langle 1,2,5\rangle ¦ 1.2 ¦ \langle 3,2,1\rangle ¦ 1 ¦ 123 ¦ \langle 1,2\rangle ¦ 6
gold   \langle 3, 5 \rangle
right  \langle 3,5\rangle ¦ \left\langle 3, 5\right\rangle
wrong  \langle 5,3\rangle ¦ 3.5 ¦ 3 ¦ \langle 3,5,0\rangle ¦ 8 ¦ \langle 3,-5\rangle
gold   (0,0,0)
right  (0, 0, 0)
wrong  0 ¦ (0,0) ¦ (0,0,1) ¦ 000 ¦ \emptyset
gold   (2, 3)
right  （2，3）
wrong  2.3 ¦ 2, 4 ¦ \frac23 ¦ 23
"""
    ),
    "sets and lists": (
        r"""
gold   1,-2
right  -2,1 ¦ 1 \text{ and } -2 ¦ \{1,-2\} ¦ x=1,-2 ¦ x=1 \text{ or } x=-2 ¦ x=1, x=-2 ¦ -2, 1.0
wrong  1 ¦ -2 ¦ 1,2 ¦ -1,2 ¦ 1,-2,0 ¦ 1-2 ¦ -1 ¦ x = 1 ¦ 1,-2,-3
gold   \{1\pm\sqrt{5},-2\}
right  \{1+\sqrt5, 1-\sqrt5, -2\} ¦ \{-2,1-\sqrt5,1+\sqrt5\} ¦ -2, 1 \pm \sqrt{5}
wrong  \{1\pm\sqrt5\} ¦ \{1+\sqrt5,-2\} ¦ -2 ¦ \{1\pm\sqrt5,2\} ¦ 1\pm\sqrt5 ¦ \{1\pm\sqrt3,-2\}
gold   \left\{-1, 0, 1\right\}
right  \{-1,0,1\} ¦ \{1,0,-1\} ¦ 0,1,-1 ¦ \{0,\pm1\}
wrong  \{-1,1\} ¦ \{0,1\} ¦ 0 ¦ [-1,1] ¦ \{-1,0,1,2\} ¦ \pm 1 ¦ \{-1,0,2\}
gold   2, 3, 5
right  5, 3, 2 ¦ \{2,3,5\} ¦ 2,\ 3,\ 5 ¦ 2, 3 \text{ and } 5 ¦ 2, 3, \text{ and } 5
wrong  2, 3 ¦ 235 ¦ 2, 3, 7 ¦ 30 ¦ 5 ¦ 2, 3, 5, 7 ¦ 2+3+5
gold   \frac{1}{2}, 3
right  3, \frac12 ¦ 0.5, 3 ¦ \{3, 1/2\}
wrong  \frac{1}{2} ¦ 3 ¦ 2, 3 ¦ \frac{1}{2,3} ¦ \frac{3}{2} ¦ -\frac12, 3
gold   3 \pm 2 \sqrt{2}
right  3+2\sqrt2, 3-2\sqrt2 ¦ x = 3 \pm 2\sqrt2 ¦ 3 \pm \sqrt8 ¦ 3±2√2 ¦ \{3-2\sqrt2, 3+2\sqrt2\}
wrong  3+2\sqrt2 ¦ 3-2\sqrt2 ¦ 3 ¦ 3 \pm 2 ¦ -3\pm2\sqrt2 ¦ 2\pm3\sqrt2 ¦ 3 \pm 2\sqrt3 ¦ 5, 1
gold   \pm 4
right  4,-4 ¦ ±4 ¦ -4, 4 ¦ x=\pm 4 ¦ 4 \text{ and } -4 ¦ x = 4 \text{ or } x = -4
wrong  4 ¦ -4 ¦ \pm 2 ¦ 4,4 ¦ \pm 4i ¦ 8 ¦ |4| ¦ \pm 4, 0
gold   \{x|x>2\}
right  \{x \mid x > 2\} ¦ (2,\infty) ¦ x>2 ¦ (2,+\infty) ¦ \{x : x > 2\}
wrong  x<2 ¦ [2,\infty) ¦ 2 ¦ \{2\} ¦ x\ge2 ¦ \{x|x<2\} ¦ (2,3) ¦ \{x|x>3\} ¦ x
gold   \emptyset
right  ∅ ¦ \{\} ¦ \{ \}
wrong  0 ¦ \{0\} ¦ 1 ¦ \mathbb{R} ¦ \{1\}
gold   2:3
right  2:3 ¦ 2 : 3 ¦ 2 \colon 3
wrong  3:2 ¦ 2 ¦ 3 ¦ 2:5 ¦ 23 ¦ 2:3:1 ¦ \frac32
gold   1:2:3
right  1 : 2 : 3
wrong  1 ¦ 1:2 ¦ 1:3:2 ¦ 6 ¦ 123 ¦ 3:2:1
"""
    ),
    "intervals": (
        r"""
gold   (-\infty, 2) \cup (3, \infty)
right  (-\infty,2)\cup(3,+\infty) ¦ (3,\infty)\cup(-\infty,2) ¦ x<2 \text{ or } x>3 ¦ (-∞,2)∪(3,∞)
right  x \in (-\infty,2) \cup (3,\infty) ¦ \left(-\infty,2\right)\cup\left(3,\infty\right)
right  x > 3 \text{ or } x < 2
wrong  (-\infty,2]\cup(3,\infty) ¦ (-\infty,2)\cup[3,\infty) ¦ (-\infty,2) ¦ (2,3) ¦ 2 ¦ 3 ¦ x<2
wrong  (-\infty,3)\cup(2,\infty) ¦ (-\infty,2)\cap(3,\infty) ¦ x \le 2 \text{ or } x > 3 ¦ 2 < x < 3
gold   x \in [-2,7]
right  [-2,7] ¦ -2\le x\le 7 ¦ x∈[-2,7] ¦ -2 \leqslant x \leqslant 7 ¦ 7 \ge x \ge -2 ¦ [-2, 7.0]
wrong  (-2,7) ¦ [-2,7) ¦ (-2,7] ¦ [-7,2] ¦ -2 ¦ 7 ¦ x \in [-2,6] ¦ -2 < x < 7 ¦ \{-2,7\} ¦ [2,7]
gold   (3,4]
right  3<x\le4 ¦ \left(3,4\right] ¦ x \in (3,4] ¦ (3, 4]
wrong  [3,4) ¦ (3,4) ¦ [3,4] ¦ 3,4 ¦ 3.4 ¦ (3,5] ¦ 4 ¦ (3,4]\cup\{5\}
gold   [0,\infty)
right  x\ge0 ¦ [0,∞) ¦ [0,+\infty) ¦ y \in [0,\infty) ¦ \left[0,\infty\right)
wrong  (0,\infty) ¦ [0,1) ¦ 0 ¦ (-\infty,0] ¦ \infty ¦ [1,\infty) ¦ x > 0
gold   \left[ \frac{\pi^3}{8}, \frac{7 \pi^3}{8} \right]
right  [\frac{\pi^3}{8},\frac{7\pi^3}{8}] ¦ \left[\frac{\pi^3}8, \frac{7\pi^3}8\right]
wrong  (\frac{\pi^3}{8},\frac{7\pi^3}{8}) ¦ [\frac{\pi^3}{8},\frac{5\pi^3}{8}] ¦ \frac{\pi^3}{8}
wrong  [\frac{\pi}{8},\frac{7\pi}{8}]
gold   [-\frac{1}{4},+\infty)
right  [-\frac14,\infty) ¦ x \ge -\frac14 ¦ [-0.25, +\infty)
wrong  (-\frac14,\infty) ¦ [\frac14,\infty) ¦ -\frac14 ¦ [-\frac{1}{4},1) ¦ x \le -\frac14
gold   (-1,0)\cup(0,1)
right  (0,1)\cup(-1,0) ¦ (-1, 0) ∪ (0, 1)
wrong  (-1,1) ¦ (-1,0) ¦ [-1,0)\cup(0,1] ¦ (-1,0]\cup[0,1) ¦ 0
gold   \mathbb{R}
right  (-\infty,\infty) ¦ \mathbb R ¦ (-\infty, +\infty)
wrong  \mathbb{Z} ¦ [0,\infty) ¦ \mathbb{Q} ¦ \infty ¦ 0 ¦ \mathbb{N}
gold   -1<a<1
right  a\in(-1,1) ¦ (-1,1) ¦ 1>a>-1 ¦ -1 \lt a \lt 1
wrong  -1\le a\le1 ¦ -1<a ¦ a<1 ¦ -1 ¦ 1 ¦ -1<a<2 ¦ 0 ¦ -1 < a \le 1
gold   a \geqslant 2
right  a\ge 2 ¦ a≥2 ¦ 2\le a ¦ [2,\infty) ¦ a\geq2 ¦ a \in [2, +\infty)
wrong  a>2 ¦ a\le2 ¦ 2 ¦ a=2 ¦ a \ge 3 ¦ a \geqslant -2 ¦ a < 2
gold   x \neq 3
right  x \ne 3 ¦ x≠3
wrong  x = 3 ¦ 3 ¦ x \neq 2 ¦ x > 3 ¦ x
gold   \infty
right  ∞ ¦ +\infty ¦ +∞
wrong  -\infty ¦ 0 ¦ 1 ¦ 8 ¦ (0,\infty)
"""
    ),
    "equations": (
        r"""
gold   \frac{x^{2}}{4} + \frac{y^{2}}{3} = 1
right  \frac{y^2}{3}+\frac{x^2}{4}=1 ¦ 3x^2+4y^2=12 ¦ \frac{x^2}{4}+\frac{y^2}{3}=1
wrong  \frac{x^2}{3}+\frac{y^2}{4}=1 ¦ 1 ¦ \frac{x^2}{4}-\frac{y^2}{3}=1
wrong  \frac{x^2}{4}+\frac{y^2}{3}=2
wrong  3x^2+4y^2=1 ¦ x^2+y^2=1 ¦ \frac{x^2}{2}+\frac{y^2}{3}=1
gold   x - 2y + 3 = 0
right  x+3=2y ¦ y=\frac{x+3}{2} ¦ 2x-4y+6=0 ¦ -x+2y-3=0 ¦ x-2y=-3
wrong  x-2y-3=0 ¦ x+2y+3=0 ¦ 0 ¦ x-2y+3=1 ¦ x-2y=3 ¦ 3 ¦ x - 2y + 3 > 0
gold   y=\pm \frac{\sqrt{3}}{3}x
right  y=\pm\frac{\sqrt3}{3}x ¦ y = \pm \frac{x}{\sqrt{3}}
wrong  y=\frac{\sqrt3}{3}x ¦ y=\pm\sqrt3x ¦ \pm\frac{\sqrt3}{3} ¦ y=\pm x ¦ y=-\frac{\sqrt3}{3}x
gold   (x-1)^2 + (y+2)^2 = 9
right  x^2+y^2-2x+4y-4=0 ¦ (y+2)^2+(x-1)^2=3^2 ¦ (x-1)^{2}+(y+2)^{2}=9
wrong  (x+1)^2+(y-2)^2=9 ¦ (x-1)^2+(y+2)^2=3 ¦ 9 ¦ (x-1)^2+(y+2)^2 < 9
gold   y^2 = 8x
right  8x = y^2 ¦ x = \frac{y^2}{8} ¦ y^{2}=8x
wrong  y = 8x ¦ x^2 = 8y ¦ 8x ¦ 8 ¦ y^2=-8x ¦ y^2=4x
gold   x = 3
right  3 ¦ x=3.0 ¦ x = \frac{6}{2}
wrong  x=-3 ¦ x=33 ¦ x ¦ x \ne 3 ¦ x>3 ¦ y=3x ¦ x = 3, 4
gold   f(x) = x + 1
right  x+1 ¦ f(x)=1+x ¦ f(x) = x+1
wrong  f(x)=x-1 ¦ x ¦ 1 ¦ f(x)=x ¦ f(x)=x^2+1 ¦ f(x)=2x+1
gold   \(f(x)=x\)
right  f(x)=x ¦ f(x) = x
wrong  f(x)=-x ¦ f(x)=1 ¦ 1 ¦ f(x)=2x ¦ f(x)=x^2
gold   a^2 + b^2 = c^2
right  c^2=a^2+b^2 ¦ b^2+a^2=c^2
wrong  a+b=c ¦ a^2+b^2 ¦ c^2 ¦ a^2-b^2=c^2 ¦ a^2+b^2=c
"""
    ),
    "named values": (
        r"""
gold   x=2, y=3
right  y=3, x=2 ¦ (x,y)=(2,3) ¦ x=2 \text{ and } y=3 ¦ x=2,\ y=3 ¦ x = 2.0, y = 3
wrong  (3,2) ¦ (x,y)=(3,2) ¦ x=3, y=2 ¦ 2 ¦ 3 ¦ x=2 ¦ x=2, y=4 ¦ y=2, x=3 ¦ x=2, z=3 ¦ 5
gold   x=t, y=2t
right  y=2t, x=t ¦ x = t, y = 2t
wrong  x=t, y=2 ¦ 2 ¦ t ¦ x=2t, y=t ¦ x=t ¦ x=t, y=t
gold   a = 1, b = -2, c = 3
right  c=3, a=1, b=-2 ¦ (a,b,c)=(1,-2,3)
wrong  a=1, b=-2 ¦ (a,b,c)=(1,3,-2) ¦ 1 ¦ a=1, b=2, c=3 ¦ 2 ¦ a=-2, b=1, c=3
gold   A=2, B=-1
right  B=-1, A=2 ¦ A=2 \text{ and } B=-1
wrong  A=-1, B=2 ¦ A=2 ¦ 1 ¦ A=2, B=1 ¦ (-1, 2)
"""
    ),
    "matrices": (
        r"""
gold   \begin{pmatrix}⏎1 \\⏎2⏎\end{pmatrix}
right  \begin{pmatrix}⏎1 \\⏎2⏎\end{pmatrix} ¦ \begin{pmatrix}1\\2\end{pmatrix}
right  \begin{bmatrix}1\\2\end{bmatrix}
right  \begin{pmatrix} 1 \\[4pt] 2 \end{pmatrix}
wrong  2 ¦ 1 ¦ \begin{pmatrix}2\\1\end{pmatrix} ¦ \begin{pmatrix}1\\3\end{pmatrix} ¦ 12
wrong  \begin{pmatrix}1\\2\\0\end{pmatrix}
gold   \begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}
right  \begin{pmatrix} -\frac{1}{3} \\ \frac23 \\ \frac53 \end{pmatrix}
right  \begin{pmatrix} -\frac13 \\[6pt] \frac23 \\[6pt] \frac53 \end{pmatrix}
wrong  \begin{pmatrix} \frac{1}{3} \\ \frac23 \\ \frac53 \end{pmatrix} ¦ \frac23
wrong  \begin{pmatrix} -\frac13 \\ \frac23 \end{pmatrix}
wrong  \begin{pmatrix} -\frac13 \\ \frac53 \\ \frac23 \end{pmatrix} ¦ \frac{5}{3} ¦ 2
gold   \begin{pmatrix} 0 & -1 \\ 1 & 0 \end{pmatrix}
right  \begin{bmatrix} 0 & -1 \\ 1 & 0 \end{bmatrix} ¦ \begin{pmatrix}0&-1\\1&0\end{pmatrix}
right  A = \begin{pmatrix} 0 & -1 \\ 1 & 0 \end{pmatrix}
right  \begin{pmatrix}⏎0 & -1 \\⏎1 & 0⏎\end{pmatrix}
right  \left(\begin{matrix} 0 & -1 \\ 1 & 0 \end{matrix}\right)
wrong  \begin{pmatrix} 0 & 1 \\ -1 & 0 \end{pmatrix} ¦ \begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}
wrong  0 ¦ 1
wrong  \begin{pmatrix} 0 & -1 \end{pmatrix} ¦ \begin{pmatrix} 0 \\ -1 \\ 1 \\ 0 \end{pmatrix}
wrong  \begin{pmatrix} 0 & -1 \\ 1 & 1 \end{pmatrix}
gold   2\mathbf{i} - 3\mathbf{j}
right  2\mathbf{i}-3\mathbf{j}
wrong  2 ¦ -3 ¦ 2\mathbf{i}+3\mathbf{j} ¦ 3\mathbf{i}-2\mathbf{j} ¦ 2\mathbf{i} ¦ -1
"""
    ),
    "cases": (
        r"""
gold   \begin{cases}x=1\\y=2\end{cases}
right  \begin{cases} x = 1 \\ y = 2 \end{cases} ¦ \begin{cases}x=1,\\y=2\end{cases}
right  \begin{cases}y=2\\x=1\end{cases}
wrong  2 ¦ 1 ¦ \begin{cases}x=2\\y=1\end{cases} ¦ x=1 ¦ x=2, y=1 ¦ 3
wrong  \begin{cases}x=1\\y=3\end{cases}
gold   f(x)=\begin{cases}0 & x<0\\1 & x\ge0\end{cases}
right  f(x) = \begin{cases} 0 & x < 0 \\ 1 & x \ge 0 \end{cases}
right  f(x)=\begin{cases}⏎0 & x<0\\⏎1 & x\ge0⏎\end{cases}
wrong  0 ¦ 1 ¦ f(x)=\begin{cases}1 & x<0\\0 & x\ge0\end{cases}
wrong  f(x)=\begin{cases}0 & x<0\\2 & x\ge0\end{cases}
wrong  f(x)=0 ¦ f(x)=\begin{cases}0 & x<1\\1 & x\ge1\end{cases} ¦ 0, 1
wrong  \begin{cases}0 & x<0\end{cases}
"""
    ),
    "congruences and bases": (
        r"""
gold   907
right  2907 \equiv 907 \pmod{1000}
wrong  2907 ¦ 2907 \equiv 970 \pmod{1000} ¦ 1000 ¦ 907! ¦ 970
gold   n \equiv 0 \pmod 3
right  n \equiv 0 \pmod{3} ¦ n\equiv 0\pmod 3 ¦ n ≡ 0 \pmod{3}
wrong  0 ¦ 3 ¦ n \equiv 1 \pmod 3 ¦ n \equiv 0 \pmod 4 ¦ n = 0 ¦ n
gold   12 \pmod{17}
right  12 \pmod{17} ¦ 12\pmod {17}
wrong  17 ¦ 13 \pmod{17} ¦ 12 \pmod{16} ¦ 1217
gold   101_2
right  101_{2} ¦ 101_2
wrong  110_2 ¦ 101_3 ¦ 1012 ¦ 2 ¦ 1011_2 ¦ 101^2
gold   2516_8
right  2516_{8} ¦ 2516_8
wrong  2516_7 ¦ 2561_8 ¦ 25168 ¦ 8 ¦ 2516_{16} ¦ 2516^8
gold   4343_6
right  4343_{6}
wrong  4343_5 ¦ 3434_6 ¦ 43436 ¦ 6 ¦ 433_6
gold   \text{BAD}_{16}
right  \text{BAD}_{16} ¦ \text{BAD}_{16}.
wrong  \text{BED}_{16} ¦ 16 ¦ \text{BAD}_{15} ¦ BA
"""
    ),
    "choices": (
        r"""
gold   C
right  (C) ¦ \text{C} ¦ \textbf{(C)} ¦ (C)\ 12 ¦ \mathrm{C} ¦ \textbf{C} ¦ C. ¦ \text{(C) } 12
right  \mathbf{C}
wrong  D ¦ (B) ¦ A, C ¦ \text{(D)} ¦ CD ¦ (C), (D) ¦ ABCDE ¦ 12 ¦ \textbf{(B)}\ 12 ¦ C + 1
wrong  C \text{ or } D ¦ 3
gold   \textbf{(C)}\ 12
right  \textbf{(C)}\ 12 ¦ C ¦ 12 ¦ (C) ¦ \text{(C)}\ 12 ¦ (C)\ 12 ¦ \textbf{(C)} 12 ¦ \text{C}
wrong  D ¦ 13 ¦ \textbf{(D)}\ 12 ¦ \textbf{(C)}\ 13 ¦ 1 ¦ 2 ¦ \textbf{(D)}\ 13 ¦ C, D
gold   \text{(E)}
right  E ¦ (E) ¦ \text{E} ¦ \textbf{(E)}
wrong  (A) ¦ F ¦ \text{(D)} ¦ AE ¦ (A), (E) ¦ 5
gold   ACD
right  ACD ¦ \text{ACD}
wrong  AC ¦ A ¦ ACE ¦ ABCD ¦ CD ¦ A, C
gold   ①③
right  ①③
wrong  ①② ¦ ① ¦ ①②③ ¦ ③ ¦ 2
"""
    ),
    "texts": (
        r"""
gold   \text{Evelyn}
right  Evelyn ¦ \mathrm{Evelyn} ¦ \textbf{Evelyn} ¦ \text{ Evelyn } ¦ Evelyn. ¦ \mbox{Evelyn}
wrong  Briana ¦ \text{Carla} ¦ \text{Evelyn and Debra} ¦ E ¦ 5 ¦ Evelina ¦ \text{Eve}
gold   \text{Friday}
right  Friday ¦ \text{friday} ¦ \mathrm{Friday}
wrong  Thursday ¦ 5 ¦ \text{Friday or Saturday} ¦ \text{Saturday} ¦ day
gold   even
right  \text{even} ¦ \text{Even} ¦ even
wrong  odd ¦ 0 ¦ 2 ¦ \text{uneven} ¦ \text{neither} ¦ e
gold   No
right  \text{No} ¦ no ¦ No. ¦ \textbf{No}
wrong  Yes ¦ 0 ¦ 1 ¦ \text{yes} ¦ x
gold   \text{ellipse}
right  ellipse ¦ \text{Ellipse}
wrong  \text{hyperbola} ¦ \text{circle} ¦ x^2+y^2=1 ¦ 2 ¦ \text{parabola}
gold   \text{June 20}
right  June 20 ¦ \text{June } 20
wrong  June 2 ¦ 20 ¦ July 20 ¦ June 21 ¦ June ¦ \text{June 20 or 21}
gold   all odd primes
right  \text{all odd primes} ¦ All odd primes
wrong  \text{all primes} ¦ 3 ¦ \text{odd primes and } 2 ¦ 2 ¦ \text{all odd numbers}
gold   undefined
right  \text{undefined} ¦ Undefined
wrong  0 ¦ 1 ¦ \infty ¦ \text{defined}
"""
    ),
    "units": (
        r"""
gold   12
right  12 \text{ cm}^3 ¦ 12\ \mathrm{cm^2} ¦ 12 cm² ¦ 12 \text{ square units}
right  12\text{ miles per hour} ¦ 12 \text{ km/h}
right  12~\text{apples} ¦ 12\,\text{cm} ¦ 12 \mathrm{~kg} ¦ 12\ \text{ways}
wrong  1.2 \text{ cm} ¦ 12^2 ¦ 12 \text{ cm} \times 2 ¦ 21 \text{ cm} ¦ \frac{12}{2} \text{ cm}
wrong  12c ¦ 12 \text{ million}
gold   12 \text{ cm}
right  12 ¦ 12 cm ¦ 12\mathrm{~cm} ¦ 12.0 \text{ cm} ¦ 12\text{cm} ¦ 12 \text{ centimeters}
wrong  13 \text{ cm} ¦ 12 \text{ km} ¦ 12 \text{ kg} ¦ 120 \text{ cm} ¦ \text{cm} ¦ 1
wrong  12x \text{ cm} ¦ 12 \text{ minutes}
gold   15\mbox{ cm}^2
right  15 ¦ 15\text{ cm}^2 ¦ 15 \text{ cm}^{2} ¦ 15 cm² ¦ 15\ \mathrm{cm}^2
wrong  15^2 ¦ 225 ¦ 51 \text{ cm}^2 ¦ 2 ¦ 15 \text{ kg} ¦ 1.5 \text{ cm}^2
gold   864 \mbox{ inches}^2
right  864 ¦ 864\text{ inches}^2 ¦ 864 \text{ in}^2
wrong  846 ¦ 86 ¦ 864 \text{ pounds} ¦ 864^2 ¦ 8.64
gold   4.5 \text{ hours}
right  4.5 ¦ \frac92 \text{ hours} ¦ 4\frac12 \text{ hours} ¦ 4.5\text{ hours}
wrong  4.5 \text{ minutes} ¦ 4 ¦ 5 ¦ 5.4 \text{ hours} ¦ 45 \text{ hours} ¦ 4.5 \text{ days}
gold   10 \text{ m/s}
right  10 ¦ 10\,\text{m/s} ¦ 10 \mathrm{~m/s} ¦ 10\text{ m/s}
wrong  10 \text{ kg} ¦ 1 ¦ 100 \text{ m/s} ¦ 10^2 ¦ 10 \text{ km/h} ¦ \frac{10}{2} \text{ m/s}
gold   3 \text{ hours } 20 \text{ minutes}
right  3 \text{ hours } 20 \text{ minutes} ¦ 3\text{ hours }20\text{ minutes}
wrong  3 ¦ 20 ¦ 3 \text{ hours} ¦ 3 \text{ hours } 30 \text{ minutes} ¦ 20 \text{ minutes} ¦ 60
wrong  320
wrong  20 \text{ hours } 3 \text{ minutes} ¦ 2 \text{ hours } 20 \text{ minutes}
gold   5 \text{ feet } 6 \text{ inches}
right  5 \text{ feet } 6 \text{ inches} ¦ 5\text{ feet }6\text{ inches}
wrong  5 ¦ 6 ¦ 5 \text{ feet} ¦ 6 \text{ feet } 5 \text{ inches} ¦ 30 ¦ 56
gold   11:30 \text{ p.m.}
right  11:30 \text{ p.m.} ¦ 11:30\text{ p.m.} ¦ 11{:}30 \text{ p.m.}
wrong  11 ¦ 30 ¦ 11:03 \text{ p.m.} ¦ 11:30 \text{ a.m.} ¦ 12:30 \text{ p.m.}
gold   8:45
right  8:45 ¦ 8{:}45
wrong  8 ¦ 45 ¦ 8:54 ¦ 8.45 ¦ 9:45
gold   5.4 \text{ cents}
right  5.4 ¦ 5.4\text{ cents} ¦ 5.4 cents
wrong  \$5.4 ¦ 54 ¦ 5.4 \text{ dollars} ¦ 4.5 \text{ cents} ¦ 5
gold   18
right  \$18 ¦ \$18.00 ¦ 18\text{ dollars} ¦ €18 ¦ £18 ¦ \$ 18 ¦ 18 \text{ USD}
wrong  \$1.8 ¦ \$81 ¦ \$18{,}000 ¦ \$18.50 ¦ \$18 \text{ or } \$19 ¦ -\$18
gold   \$32,\!348
right  32348 ¦ \$32,348 ¦ 32,348 ¦ 32{,}348 \text{ dollars} ¦ \$32{,}348.00
wrong  32 ¦ 348 ¦ \$32.348 ¦ \$32,\!384 ¦ 32,348,000
gold   \$7
right  \$7.00 ¦ 7 ¦ 7\text{ dollars}
wrong  \$0.7 ¦ \$70 ¦ 7 \text{ cents} ¦ \$7k
gold   90^\circ
right  90° ¦ 90 ¦ 90 \text{ degrees} ¦ {90}^\circ ¦ 90.0^\circ
wrong  9^\circ ¦ 60° ¦ 90^2 ¦ 0 ¦ 90\pi ¦ 90^\circ 30' ¦ 9
gold   \frac{270}7\text{ degrees}
right  \frac{270}{7} ¦ \frac{270}{7}^\circ ¦ \left(\frac{270}{7}\right)^\circ ¦ 270/7
right  \frac{270}{7} \text{ degrees}
wrong  270 ¦ 7 ¦ \frac{27}{7} ¦ 38.57 ¦ 38^\circ
gold   20\%
right  20% ¦ 20 \, \% ¦ 20 ¦ 20 \text{ percent} ¦ 20.0\% ¦ 20 \%
wrong  2\% ¦ 200\% ¦ 0.02 ¦ 2 ¦ 20.5\% ¦ 0.2\% ¦ 2000
gold   66\frac{2}{3}\%
right  66\frac23\% ¦ \frac{200}{3}\% ¦ \frac{200}{3}
wrong  66\% ¦ 66.7\% ¦ 66 ¦ \frac23\% ¦ 33\frac13\% ¦ 66 \cdot \frac23\% ¦ 663\%
gold   17.5\%
right  17.5 ¦ 17.5% ¦ 17\frac12\% ¦ \frac{35}{2}\%
wrong  17\% ¦ 1.75\% ¦ 175\% ¦ 17 ¦ 5\% ¦ 17.5x\%
"""
    ),
    "unicode": (
        r"""
gold   45^\circ
right  45° ¦ 45∘
wrong  45√ ¦ 54° ¦ 4°5
gold   \sqrt{2}
right  √2 ¦ √{2} ¦ √(2)
wrong  √3 ¦ √ ¦ 2√ ¦ 2√2 ¦ √22
gold   x^2
right  x² ¦ x·x
wrong  x³ ¦ x ¦ 2x ¦ x₂ ¦ 2
gold   (-\infty, 3]
right  (-∞, 3] ¦ (−∞, 3] ¦ x ≤ 3
wrong  (-∞, 3) ¦ (∞, 3] ¦ x ≥ 3 ¦ (-∞, 4] ¦ 3
gold   -5
right  –5 ¦ −5 ¦ − 5
wrong  5 ¦ –6 ¦ ±5 ¦ —15
gold   \frac{\pi}{2}
right  π/2 ¦ ½π ¦ \frac{π}{2}
wrong  2π ¦ π ¦ π² ¦ ½ ¦ π/3
gold   6000
right  6×10³ ¦ 6 × 1000 ¦ 6·10³
wrong  6×10² ¦ 6 ¦ 6×10 ¦ 610³
gold   x^2 + 1
right  x²+1 ¦ 1 + x²
wrong  x²−1 ¦ x²+² ¦ x²+x ¦ x²
gold   x \le 4
right  x ≤ 4 ¦ 4 ≥ x
wrong  x ≥ 4 ¦ x < 4 ¦ x ≠ 4 ¦ 4 ≤ x
"""
    ),
    "layout": (
        r"""
gold   7
right  ⏎7⏎ ¦ \,7\, ¦ \;7 ¦ \displaystyle 7 ¦ {7} ¦ 7\quad ¦ ~7 ¦ \mbox{7} ¦ \boxed{7} ¦ $7$
right  \mathrm{7} ¦ 7\! ¦ \(7\)
wrong  ⏎8⏎ ¦ 7⏎8 ¦ \mbox{8} ¦ \boxed{8} ¦ $7$, $8$ ¦ {7}{7}
gold   7⏎
right  7 ¦ \text{7}
wrong  70 ¦ 8
gold   ⏎\frac{3}{4}⏎
right  0.75 ¦ \frac{3}{4} ¦ \displaystyle\frac34 ¦ \frac{3}⏎{4}
wrong  3 ¦ 4 ¦ \frac{4}{3} ¦ 34
gold   (1,⏎2)
right  (1,2) ¦ \left( 1 , 2\right) ¦ (1,⏎2)
wrong  (2,1) ¦ 1 ¦ 2 ¦ 12
gold   x^2⏎+ 3x
right  x^2+3x ¦ x(x+3) ¦ x^2 + 3x
wrong  x^2 ¦ 3x ¦ x^2-3x ¦ x^2+3
gold   \dfrac{\,1\,}{\,2\,}
right  \frac12 ¦ 0.5 ¦ 1/2
wrong  1 ¦ 2 ¦ 12 ¦ \frac{2}{1}
"""
    ),
    "equations that name the result": (
        r"""
gold   34
right  \text{The answer is } 34 ¦ 34 \text{ apples} ¦ \text{Total} = 34 ¦ S = 34 ¦ |AB| = 34
right  a + b = 34 ¦ f(2) = 34
right  30 + 4 = 34 ¦ \frac{68}{2} = 34 ¦ S_{10} = 34 ¦ m+n = 33+1 = 34 ¦ AB = 34 ¦ x_1 = 34
wrong  f(34) = 2 ¦ 34 = 33 + 2 ¦ x + 34 ¦ S = 43 ¦ S_{34} ¦ 34 + 0x + 1 ¦ a_{34} = 5 ¦ \frac{34}{a}
gold   103
right  m+n = 100+3 = 103 ¦ 100 + 3 = 103 ¦ m + n = 103
wrong  m+n = 100+3 = 104 ¦ 100 + 3 = 105 ¦ \frac{100}{3} ¦ m = 100, n = 3 ¦ 103m
gold   \frac{1}{3}
right  P(A) = \frac{1}{3} ¦ P = 1 - \frac23 = \frac13 ¦ \frac{2}{6} = \frac{1}{3}
wrong  P(A) = 3 ¦ P(\frac13) = 1 ¦ 1 - \frac13 ¦ 1 - \frac{1}{3} = \frac23
"""
    ),
    "further numbers": (
        r"""
gold   2,500
right  2500 ¦ 2500. ¦ \text{2,500} ¦ 2.5 \times 10^{3} ¦ 2{,}500.00 ¦ 2\,500
wrong  25,000 ¦ 2.5 ¦ 2,5 ¦ 250 ¦ 500 ¦ 2,500x
gold   0.0001
right  1.0 \times 10^{-4} ¦ 10^{-4} ¦ \frac{1}{10000} ¦ 1e-4
wrong  10^{-5} ¦ 0.001 ¦ 1 ¦ -4 ¦ 10^4 ¦ 0
gold   -\frac{1}{2}
right  -.5 ¦ −½ ¦ \frac{1}{-2} ¦ -0.50 ¦ -\left(\frac{1}{2}\right)
wrong  0.5 ¦ -2 ¦ -\frac{1}{3} ¦ ½ ¦ \frac{-1}{-2} ¦ -1
gold   \frac{22}{7}
right  22/7 ¦ 3\frac{1}{7} ¦ 3.\overline{142857}
wrong  \pi ¦ 3.14 ¦ 22.7 ¦ \frac{7}{22} ¦ 3.142857
gold   2^{100}
right  1267650600228229401496703205376 ¦ 4^{50} ¦ 2 \cdot 2^{99} ¦ 1024^{10}
wrong  2^{99} ¦ 1267650600228229401496703205375 ¦ 200 ¦ 100^2 ¦ 1.27 \times 10^{30} ¦ 2^{10}0
gold   252
right  \binom{10}{5} ¦ \frac{10!}{5!5!} ¦ \frac{10!}{(5!)^2} ¦ {10 \choose 5} ¦ \dbinom{10}{5}
wrong  \binom{10}{4} ¦ \frac{10!}{5!} ¦ 10! ¦ 525 ¦ \frac{10}{5}
gold   10\%
right  10% ¦ \frac{1}{10} ¦ 10 \text{ percent}
wrong  1\% ¦ 0.01 ¦ 1 ¦ 100\% ¦ 10\% \text{ or } 20\%
gold   0.5\%
right  \frac{1}{2}\% ¦ 0.50\% ¦ .5\%
wrong  5\% ¦ 50\% ¦ 0.05\% ¦ 5
gold   1.5 \text{ million}
right  1.5 \text{ million} ¦ 1{,}500{,}000 ¦ 1500000
wrong  1.5 ¦ 15 \text{ million} ¦ 1.5 \text{ billion} ¦ 150000
gold   2.\overline{27}
right  \frac{25}{11} ¦ 25/11 ¦ 2\frac{3}{11}
wrong  2.27 ¦ 2.\overline{72} ¦ \frac{27}{11} ¦ 2 ¦ 2.2\overline{7}
"""
    ),
    "further expressions": (
        r"""
gold   \sqrt{50}
right  5\sqrt{2} ¦ \sqrt{25 \cdot 2} ¦ \frac{10}{\sqrt2} ¦ 5 \cdot 2^{1/2}
wrong  7.07 ¦ \sqrt{5}0 ¦ 25\sqrt2 ¦ 50 ¦ 5 ¦ 2\sqrt{5}
gold   3\sqrt[3]{2}
right  \sqrt[3]{54} ¦ 3 \cdot 2^{1/3} ¦ 3\sqrt[3]2
wrong  3\sqrt{2} ¦ \sqrt[3]{6} ¦ 3 ¦ 3^{1/3} \cdot 2 ¦ \sqrt[3]{2}
gold   \frac{\sqrt{6}-\sqrt{2}}{4}
right  \sin 15^\circ ¦ \cos 75^{\circ} ¦ \frac{\sqrt{2}(\sqrt{3}-1)}{4} ¦ (\sqrt6-\sqrt2)/4
wrong  \frac{\sqrt{6}+\sqrt{2}}{4} ¦ \sqrt{6}-\frac{\sqrt{2}}{4} ¦ \sin 15 ¦ \frac{\sqrt{4}}{4}
wrong  0.2588
gold   \arctan 2
right  \tan^{-1} 2 ¦ \tan^{-1}(2) ¦ \arctan(2)
wrong  \arctan \frac12 ¦ \tan 2 ¦ 2 ¦ \frac{1}{\tan 2} ¦ \arctan 3
gold   e^{-1}
right  1/e ¦ \frac{1}{e} ¦ e^{-1.0}
wrong  e ¦ -e ¦ 0.368 ¦ -1 ¦ e - 1 ¦ e^{1}
gold   \frac{1}{x+1}
right  (x+1)^{-1} ¦ 1/(x+1) ¦ \frac{2}{2x+2}
wrong  1/x+1 ¦ \frac{1}{x}+1 ¦ x+1 ¦ \frac{1}{x-1} ¦ \frac{1}{y+1} ¦ \frac{x}{x+1}
gold   ab+bc+ca
right  bc+ca+ab ¦ a(b+c)+bc ¦ ab + c(a+b)
wrong  abc ¦ a+b+c ¦ ab+bc ¦ 2(ab+bc+ca) ¦ ab+bc+cd
gold   a^{b+c}
right  a^b a^c ¦ a^b \cdot a^c ¦ a^{c+b}
wrong  a^b + c ¦ a^{bc} ¦ a^b+a^c ¦ a^{b-c} ¦ a
gold   |x|
right  \left|x\right| ¦ \lvert x \rvert ¦ |-x|
wrong  x ¦ -x ¦ \pm x ¦ |y| ¦ |x|^2
gold   \frac{a}{b}
right  a/b ¦ ab^{-1} ¦ \frac{2a}{2b} ¦ \dfrac ab
wrong  \frac{b}{a} ¦ ab ¦ a-b ¦ a ¦ \frac{a}{c}
gold   n!
right  n \cdot (n-1)! ¦ n(n-1)!
wrong  n ¦ (n-1)! ¦ n^n ¦ (n+1)! ¦ n!!
gold   2\cos\theta
right  2 \cos(\theta) ¦ 2\cos{\theta} ¦ \cos\theta \cdot 2
wrong  \cos 2\theta ¦ 2\sin\theta ¦ \cos\theta ¦ 2 ¦ 2\cos\phi ¦ 2\theta
gold   \sec^2 x
right  \frac{1}{\cos^2 x} ¦ 1+\tan^2 x ¦ (\sec x)^2
wrong  \sec x ¦ \sec^2 y ¦ \tan^2 x ¦ \frac{1}{\sin^2 x} ¦ \cos^2 x
gold   \frac{-b \pm \sqrt{b^2-4ac}}{2a}
right  x = \frac{-b \pm \sqrt{b^2-4ac}}{2a} ¦ \frac{-b\pm\sqrt{b^{2}-4ac}}{2a}
wrong  \frac{-b + \sqrt{b^2-4ac}}{2a} ¦ \frac{b \pm \sqrt{b^2-4ac}}{2a}
wrong  \frac{-b \pm \sqrt{b^2+4ac}}{2a}
gold   \vec{a} - \vec{b}
right  -\vec{b}+\vec{a} ¦ \vec{a}-\vec{b}
wrong  \vec{a}+\vec{b} ¦ \vec{a} ¦ \vec{b}-\vec{a} ¦ 0
gold   F_{2024}
right  F_{2024}
wrong  2024 ¦ F_{2023} ¦ F ¦ F_{2024}+1 ¦ F_2
gold   \frac{x^3}{3} + C
right  \frac{1}{3}x^3 + C ¦ C + \frac{x^3}{3} ¦ x^3/3 + C
wrong  \frac{x^2}{3} + C ¦ x^3 + C ¦ 3 ¦ C ¦ \frac{x^3}{2} + C
gold   2^{n+1} - 2
right  2(2^n - 1) ¦ 2 \cdot 2^n - 2 ¦ -2 + 2^{n+1}
wrong  2^{n+1} ¦ 2^n - 2 ¦ 2^{n-1} ¦ 2^{n+1}-1 ¦ 2^{n+1} + 2
"""
    ),
    "further lists and intervals": (
        r"""
gold   (a, a+1)
right  (a, 1+a) ¦ \left(a,a+1\right)
wrong  (a, a-1) ¦ (a+1, a) ¦ a ¦ (a, a+2) ¦ (b, b+2)
gold   (-3, 0), (3, 0)
right  (3,0), (-3,0) ¦ (-3,0) \text{ and } (3,0) ¦ \{(3,0),(-3,0)\} ¦ (\pm 3, 0)
wrong  (3,0) ¦ (-3,0), (0,3) ¦ (0,-3), (0,3) ¦ 3 ¦ (-3,0,3,0) ¦ (-3,0), (3,1)
gold   x=1 \text{ or } x=-4
right  1, -4 ¦ \{-4,1\} ¦ x=-4, x=1 ¦ x = -4 \text{ or } x = 1 ¦ -4 \text{ and } 1
wrong  1 ¦ x=1 ¦ x=-1 \text{ or } x=4 ¦ 1, 4 ¦ -3 ¦ x = 1, -4, 0
gold   2 < x \le 5
right  (2,5] ¦ 5 \ge x > 2 ¦ x\in(2,5] ¦ x \in \left(2, 5\right]
wrong  [2,5) ¦ 2<x<5 ¦ 2 \le x \le 5 ¦ (2,5) ¦ 3,4,5 ¦ 2 < x \le 6 ¦ (5,2]
gold   (-\infty,-1] \cup [1,\infty)
right  x\le-1 \text{ or } x\ge1 ¦ [1,\infty)\cup(-\infty,-1] ¦ x \geq 1 \text{ or } x \leq -1
wrong  (-1,1) ¦ |x|>1 ¦ [-1,1] ¦ x\ge1 ¦ (-\infty,-1) \cup [1,\infty) ¦ x\le-1 \text{ and } x\ge1
wrong  \pm 1
gold   (-\infty, 0) \cup (0, \infty)
right  (0,\infty)\cup(-\infty,0) ¦ x<0 \text{ or } x>0 ¦ (−∞, 0) ∪ (0, ∞)
wrong  \{0\} ¦ 0 ¦ (0,\infty) ¦ (-\infty,\infty) ¦ (-\infty, 0] \cup (0, \infty)
gold   x > -\frac{3}{2}
right  (-\frac32,\infty) ¦ x>-1.5 ¦ -1.5<x ¦ x \in \left(-\frac{3}{2}, \infty\right)
wrong  x<-\frac32 ¦ x > \frac32 ¦ x \ge -\frac32 ¦ -\frac32 ¦ (-\frac23,\infty) ¦ x = -\frac32
gold   \{1, 2, 3, 4, 5, 6\}
right  1,2,3,4,5,6 ¦ \{6,5,4,3,2,1\} ¦ \left\{ 1, 2, 3, 4, 5, 6 \right\}
wrong  1,2,3,4,5 ¦ \{1,2,3,4,5,7\} ¦ [1,6] ¦ 6 ¦ 123456 ¦ \{1,6\} ¦ 21
gold   [1, 3) \cup (3, 5]
right  (3,5] \cup [1,3) ¦ [1,3)∪(3,5]
wrong  [1,5] ¦ [1,3] \cup (3,5] ¦ [1,3) ¦ (1,3) \cup (3,5) ¦ [1,3) \cup (3,6] ¦ 3
gold   \frac{1}{3}, -2, \frac{5}{2}
right  -2, \frac13, \frac52 ¦ -2, 1/3, 2.5 ¦ x = \frac13, -2, \frac52
wrong  \frac13, -2 ¦ \frac13, 2, \frac52 ¦ 3, -2, \frac52 ¦ \frac13 ¦ -2, 0.33, 2.5
"""
    ),
    "further equations and matrices": (
        r"""
gold   y = -\frac{1}{2}x + 4
right  x+2y=8 ¦ 2y = 8 - x ¦ y=4-\frac{x}{2} ¦ y = -0.5x + 4 ¦ x + 2y - 8 = 0
wrong  y=\frac12x+4 ¦ y=-\frac12 x-4 ¦ -\frac{1}{2}x + 5 ¦ x+2y=4 ¦ 4 ¦ y = -\frac{1}{2} + 4
gold   a=3, b=4
right  b=4, a=3 ¦ (a,b)=(3,4) ¦ a = 3 \text{ and } b = 4
wrong  a=4, b=3 ¦ (a,b)=(4,3) ¦ a=3 ¦ 3 ¦ 7 ¦ a=3, c=4 ¦ 5
gold   \begin{bmatrix} 2 & 1 \\ 0 & 3 \end{bmatrix}
right  \left[\begin{array}{cc} 2 & 1 \\ 0 & 3 \end{array}\right]
right  \begin{pmatrix}2&1\\0&3\\\end{pmatrix}
right  \begin{bmatrix} 2 & 1 \\[2mm] 0 & 3 \end{bmatrix}
right  \begin{bmatrix} \frac{4}{2} & 1 \\ 0 & 3 \end{bmatrix}
wrong  \begin{bmatrix} 2 & 0 \\ 1 & 3 \end{bmatrix} ¦ 2
wrong  \begin{bmatrix} 2 & 1 \\ 0 & 4 \end{bmatrix} ¦ 6
wrong  \begin{bmatrix} 2 & 1 \end{bmatrix} ¦ \begin{bmatrix} 2 & 1 & 0 & 3 \end{bmatrix}
wrong  2, 1, 0, 3
gold   \begin{pmatrix} x \\ y \end{pmatrix}
right  \begin{bmatrix}x\\y\end{bmatrix}
wrong  \begin{pmatrix} y \\ x \end{pmatrix} ¦ x ¦ y ¦ \begin{pmatrix} x \\ x \end{pmatrix}
gold   x^2 + y^2 - 6x = 0
right  (x-3)^2 + y^2 = 9 ¦ x^2+y^2=6x
wrong  (x-3)^2+y^2=3 ¦ x^2+y^2-6x ¦ (x+3)^2+y^2=9 ¦ 0 ¦ x^2 + y^2 = 6
"""
    ),
    "further texts and units": (
        r"""
gold   B
right  \text{(B) 12} ¦ \textbf{B} ¦ (\text{B}) ¦ \text{B.}
wrong  8 ¦ \beta ¦ A \text{ or } B ¦ BC ¦ \text{(A) 12} ¦ 13 ¦ A, B
gold   \text{True}
right  True ¦ \text{true} ¦ \textbf{True}
wrong  False ¦ 1 ¦ \text{false} ¦ T = 1
gold   \text{isosceles}
right  isosceles ¦ \text{Isosceles}
wrong  \text{equilateral} ¦ \text{scalene} ¦ 2 ¦ \text{not isosceles}
gold   \text{Team 3}
right  Team 3 ¦ \text{team 3}
wrong  \text{Team 4} ¦ \text{Team} ¦ \text{Team 33} ¦ 4
gold   25 \text{ mph}
right  25 ¦ 25\text{ mph} ¦ 25.0 \text{ mph}
wrong  25 \text{ km/h} ¦ 52 \text{ mph} ¦ 2.5 ¦ 25 \text{ hours} ¦ 25^2
gold   45 \text{ minutes}
right  45 ¦ 45 \text{ min} ¦ 45\,\text{minutes}
wrong  45 \text{ seconds} ¦ 45 \text{ hours} ¦ 4.5 \text{ minutes} ¦ 54
gold   \$1.25
right  1.25 ¦ \$1.25 ¦ 1.25 \text{ dollars}
wrong  \$125 ¦ 1.52 ¦ \$1 ¦ 25 ¦ 1.25 \text{ cents}
gold   \frac{\pi}{3} \text{ radians}
right  \frac{\pi}{3} ¦ π/3
wrong  \frac{\pi}{6} ¦ 3 ¦ \frac{\pi}{3} \text{ degrees} ¦ 1.047
gold   \theta = 60^\circ
right  60^\circ ¦ θ = 60° ¦ 60° ¦ \theta = 60
wrong  θ = 30° ¦ \theta ¦ 6 ¦ 60^2
gold   2^{10}
right  2¹⁰ ¦ 1024 ¦ 1,024
wrong  210 ¦ 2¹ ¦ 2^{1}0 ¦ 20 ¦ 10^2
gold   \frac{1}{4}
right  ¼ ¦ 1⁄4 ¦ 0.25
wrong  ½ ¦ 14 ¦ 1 ¦ ¾
gold   \frac{1}{2}
right  \left(\frac12\right) ¦ \large \frac{1}{2} ¦ \mathbf{\frac{1}{2}} ¦ \mathbf{x = \frac12}
right  \frac{1}{2}\text{.}
wrong  \frac12 \text{ or } \frac13 ¦ \frac12 \quad \frac13 ¦ \frac12 - ¦ \left(\frac12, 1\right)
wrong  \frac12\frac12
gold   12_5
right  12_{5}
wrong  21_5 ¦ 12_6 ¦ 125 ¦ 12_{51} ¦ 7_5
"""
    ),
}
r"""Kinds of answers, all of them the contents of a `\boxed{…}`."""

WRITTEN: dict[str, str] = {
    "the question in other words": (
        r"""
gold   57
wrong  To calculate the sum of 30 + 27, we'll need to ¦ To find 30 + 27, we need
wrong  The sum of 30 + 27 is
wrong  I bought 30 + 27 apples and the answer is 12 apples. ¦ We must compute $30 + 27$.
wrong  What is 30 + 27?
wrong  Find the value of 19 \cdot 3. ¦ He has 30 + 27 apples. ¦ Let us add 30 + 27 step by step.
wrong  30 + 27 is not hard
wrong  To calculate 60 - 3, we subtract. ¦ We have to find 3 \times 19 ¦ Start with 30, then add 27.
right  The sum of 30 and 27 is 57. ¦ To find 30 + 27, we add: 30 + 27 = 57 ¦ 30 + 27 = 57.
right  30 + 27 is 57.
gold   33
wrong  16 + 17 is indeed equal to ¦ When the equation 16 + 17 doesn't fit in itself, it
wrong  16 + 17 is 22. ¦ 16 + 17 equals 22.
wrong  16 + 17 = 22 ¦ 16 + 17 = 34. ¦ The question is 16 + 17. ¦ If we add 16 + 17, we get
wrong  16 + 17 equals
right  16 + 17 = 33 ¦ The answer is 33. ¦ 16 + 17 equals 33. ¦ So 16 + 17 = 33.
gold   11
wrong  13 is the equivalent of 8 + 3. ¦ 8 + 3 is 10. ¦ To find 8 + 3, ¦ The result of 8 + 3 is 12.
right  8 + 3 = 11 ¦ The result of 8 + 3 is 11.
gold   96
wrong  Prefix: 28 + 68 does not exist. ¦ Compute 28 + 68. ¦ We should work out $28 + 68$ first.
wrong  Note that 28 + 68 = 68 + 28.
right  28 + 68 = 96. ¦ The total is **96**.
gold   \frac{5}{6}
wrong  To find \frac{1}{2} + \frac{1}{3}, we need a common denominator.
wrong  We add $\frac12$ and $\frac13$.
right  $\frac12 + \frac13 = \frac56$ ¦ The sum is $\frac{5}{6}$.
gold   144
wrong  Let us compute 12 \times 12 first. ¦ We need the square of 12.
wrong  The area of a 12 by 12 square is wanted.
right  12 \times 12 = 144 ¦ $12^2 = 144$ ¦ The area is 144 square units.
"""
    ),
    "answer lines": (
        r"""
gold   34
right  Answer:34 ¦ Final Answer:**34** ¦ **Final Answer**⏎⏎34 ¦ #### 34 ¦ Answer: $34$
right  **Answer: 34** ¦ **Answer:** 34
right  The final answer is $\boxed{34}$. ¦ Final answer: 34. ¦ ANSWER: 34
right  Therefore, the answer is \(34\). ¦ $$34$$
right  So the total is 34 apples. ¦ Thus, $x = 34$. ¦ The answer is: 34 ¦ answer: 34
right  Final Answer: \boxed{34} ¦ $34$.
right  Step 1: 17 is half.⏎Step 2: we double it.⏎Answer: 34 ¦ The answer is \$34.
right  The answer is **34**.
wrong  Answer:43 ¦ Answer: 34 + 1 ¦ Answer: 34x ¦ Answer: 34/2 ¦ Answer: \frac{34}{2}
wrong  Answer: 34 or 35 ¦ #### 35
wrong  Final Answer:**35** ¦ Answer: ¦ The answer is between 30 and 40. ¦ Answer:34\sqrt{2}
wrong  The answer is 3.4.
wrong  Answer: $34\pi$ ¦ Step 34: the answer is 5. ¦ The answer is 34{,}000. ¦ Answer: -34
wrong  Answer: 34^2
gold   \frac{3}{4}
right  Answer:\frac{3}{4} ¦ Answer: 3/4 ¦ **Answer:** $\frac34$ ¦ The probability is $\frac{3}{4}$.
right  The answer is 0.75.
wrong  Answer: 3 ¦ Answer:\frac{4}{3} ¦ The probability is 3 out of 5. ¦ Answer: $\frac{3}{4} + 1$
wrong  The answer is 0.7.
gold   (2,3)
right  Answer: (2,3) ¦ The point is $(2,3)$. ¦ **Answer:** $(2, 3)$
wrong  Answer: (3,2) ¦ Answer: 2 ¦ The point is $(2,3,4)$. ¦ Answer: (2,-3)
"""
    ),
    "boxes in prose": (
        r"""
gold   7
right  \boxed{5} is the radius, so the area is \boxed{7}. ¦ \boxed {7} ¦ $\boxed{7}$ is the answer.
right  We get $$\boxed{7}.$$
right  \[\boxed{⏎7⏎}\] ¦ The answer is \boxed{7}. Note that 7 is prime. ¦ **\boxed{7}**
right  Hence $n = \boxed{7}$.
right  First guess \boxed{12}. After checking, the answer is \boxed{7}.
right  \boxed{7}⏎⏎This uses 3 of the 9 rules.
wrong  \boxed{7} is the radius, so the area is \boxed{5}. ¦ \boxed {8} ¦ The 7 of \boxed{17}
wrong  $\boxed{7x}$
wrong  First guess \boxed{7}. After checking, the answer is \boxed{12}. ¦ 7 and then \boxed{9}
wrong  \boxed{7}, \boxed{8}
gold   3, 4
right  \boxed{3}, \boxed{4} ¦ \boxed{3} and \boxed{4} ¦ $\boxed{3}$ and $\boxed{4}$
right  The solutions are \boxed{4, 3}.
wrong  \boxed{3} ¦ \boxed{3} and \boxed{5} ¦ \boxed{4} ¦ 3, 4, so \boxed{5}
wrong  \boxed{3}, \boxed{4}, \boxed{5}
gold   \begin{pmatrix} 1 \\ 2 \end{pmatrix}
right  The vector is⏎\[⏎\boxed{\begin{pmatrix}⏎1 \\⏎2⏎\end{pmatrix}}.⏎\]
wrong  The vector is⏎\[⏎\boxed{\begin{pmatrix}⏎2 \\⏎1⏎\end{pmatrix}}.⏎\]
wrong  \boxed{1} and \boxed{2} \\ so \boxed{2}
gold   C
right  The answer is \boxed{\text{C}}. ¦ Therefore, **(C)** is right: \boxed{C} ¦ Answer: C
right  The answer is (C). ¦ **C**
wrong  The answer is \boxed{\text{B}}. ¦ C is wrong, so \boxed{D} ¦ Answer: D ¦ The answer is (A).
"""
    ),
    "further prose": (
        r"""
gold   15
right  Thus the answer is $\boxed{15}$.⏎⏎Let me double check: 3 × 5 = 15. ¦ The value of x is 15.
right  **Final answer:** $15$
right  \[⏎x = 15⏎\] ¦ Therefore there are 15 ways. ¦ It takes 15 minutes.
right  So, the final answer is: $\boxed{15}$
right  We have 3 rows of 5, so 3 × 5 = 15 seats. ¦ The answer is fifteen, i.e. $\boxed{15}$.
right  #### 15⏎
wrong  We know 3 × 5 is the product. ¦ 15 was my first guess, but the answer is \boxed{16}.
wrong  The answer is 1.5.
wrong  The answer is 150. ¦ The answer is $15 + 1$. ¦ #### 15 + 1 ¦ Answer: 15 or 16
wrong  There are 3 groups of 5.
wrong  Compute $3 \cdot 5$. ¦ 7 + 8 gives the number of apples ¦ The answer is $15x$.
wrong  The answer is -15.
wrong  To get the total, we add 7 and 8: 7 + 8 ¦ We need to evaluate $\frac{30}{2}$ now.
wrong  The expression $\sqrt{225}$ is to be simplified.
gold   1, 2
right  The roots are $1$ and $2$. ¦ $x = 1$ or $x = 2$ ¦ The roots are \boxed{2} and \boxed{1}.
wrong  The roots are $1$ and $3$. ¦ The root is $1$. ¦ The roots are \boxed{1} and \boxed{3}.
wrong  There are 2 roots.
gold   \frac{7}{2}
right  x = 7/2 ¦ So the slope is $3\frac12$. ¦ **Answer:** $\frac{7}{2}$ ¦ The answer is 3.5.
wrong  The slope is $\frac{2}{7}$. ¦ The answer is 7. ¦ Answer: 7/3
wrong  So the slope is $\frac{7}{2} + 1$.
gold   x^2
right  The answer is $x^2$. ¦ Answer: x^2 ¦ $\boxed{x^2}$
wrong  The answer is $x^3$. ¦ Answer: 2 ¦ The answer is $x^2 + 1$. ¦ Answer: x
gold   B
right  The correct option is B. ¦ Answer: (B) ¦ **B** ¦ The answer is **(B)**.
wrong  The answer is **(A)**. ¦ I would rule out B, so the answer is C. ¦ Answer: A
wrong  The correct option is D.
"""
    ),
}
"""Kinds of answers with the words around them."""


def cases_of(table: str, form: str = "{}") -> tuple[Case, ...]:
    """Return the cases of one table. form: what stands around each answer, whose place
    is `{}`.
    """
    cases = []
    gold = ""
    for line in table.strip().splitlines():
        column, _, text = line.partition(" ")
        text = text.strip().replace("⏎", "\n")
        if column == "gold":
            gold = text
            continue
        for answer in text.split("¦"):
            cases.append(Case(form.replace("{}", answer.strip(" ")), gold, column == "right"))
    return tuple(cases)


CASES: dict[str, tuple[Case, ...]] = {
    **{kind: cases_of(table, r"\boxed{{}}") for kind, table in BOXED.items()},
    **{kind: cases_of(table) for kind, table in WRITTEN.items()},
}
"""All cases, by kind."""
