r"""Forms of answers, right and wrong: for each expected answer others that equal it,
and near misses.

gold    an expected answer
prompt  the question, where the verdict depends on it
right   answers that equal it, between `¦`; `⏎` is a line break
wrong   answers that do not: one sign, digit, bound or letter is another, or a number
        was taken out of it
"""

from typing import NamedTuple


class Form(NamedTuple):
    """An answer, the expected one, whether it is right, and the question."""

    answer: str
    gold: str
    right: bool
    prompt: str = ""


BOXED = r"""
gold   \begin{pmatrix}⏎1 \\⏎2⏎\end{pmatrix}
right  \begin{pmatrix} 1 \\ 2 \end{pmatrix} ¦ \begin{bmatrix}1\\2\end{bmatrix}
right  \begin{pmatrix}⏎1 \\⏎2⏎\end{pmatrix} ¦ \begin{pmatrix}1\\[6pt]2\end{pmatrix}
right  \langle 1,2\rangle ¦ \left(\begin{array}{c}1\\2\end{array}\right)
wrong  1 ¦ 2 ¦ 1, 2 ¦ \begin{pmatrix}2\\1\end{pmatrix} ¦ \begin{pmatrix}1&2\end{pmatrix} ¦ 12
wrong  \frac12 ¦ \begin{pmatrix}1\\2\\3\end{pmatrix}
gold   \begin{bmatrix} 1 & 0 \\ 0 & -1 \end{bmatrix}
right  \begin{pmatrix}1&0\\0&-1\end{pmatrix}
right  \left[\begin{array}{cc}1 & 0\\0 & -1\end{array}\right]
right  \begin{bmatrix}⏎1 & 0 \\[4pt]⏎0 & -1⏎\end{bmatrix}
right  A = \begin{bmatrix} 1 & 0 \\ 0 & -1 \end{bmatrix}
wrong  \begin{bmatrix} 1 & 0 \\ 0 & 1 \end{bmatrix} ¦ -1 ¦ 1
wrong  \begin{bmatrix} 0 & 1 \\ -1 & 0 \end{bmatrix} ¦ (1,0,0,-1)
gold   \frac{1}{2}\begin{pmatrix} 2 & 4\\6&8\end{pmatrix}
right  \begin{pmatrix}1&2\\3&4\end{pmatrix}
wrong  \begin{pmatrix}2&4\\6&8\end{pmatrix} ¦ \frac12
gold   2√3
right  2\sqrt{3} ¦ \sqrt{12} ¦ 2√3 ¦ 2\sqrt3 ¦ √12 ¦ \frac{6}{\sqrt3} ¦ 2·√3 ¦ 2*sqrt(3)
wrong  2 ¦ 3 ¦ 2√5 ¦ \sqrt 3 ¦ 3√2 ¦ 23 ¦ 6
gold   5²
right  25 ¦ 5^2 ¦ 5²
wrong  5 ¦ 2 ¦ 10 ¦ 52
gold   10⁶
right  1000000 ¦ 1,000,000 ¦ 10^6 ¦ 10^{6}
wrong  10 ¦ 6 ¦ 106 ¦ 10^5 ¦ 60
gold   10⁻³
right  0.001 ¦ \frac{1}{1000} ¦ 1e-3 ¦ 10^{-3}
wrong  10 ¦ -3 ¦ 1000 ¦ 10^3
gold   1½
right  1.5 ¦ \frac32 ¦ 3/2 ¦ 1\frac12 ¦ 1 1/2 ¦ 1½
wrong  1 ¦ ½ ¦ 2 ¦ 12
gold   3·4
right  12 ¦ 3\cdot4 ¦ 3 \times 4
wrong  3 ¦ 4 ¦ 34 ¦ 3.4 ¦ 7
gold   log₂ 3
right  \log_2 3 ¦ \log_{2}3 ¦ \log_2(3) ¦ \frac{\ln 3}{\ln 2} ¦ \frac{\log 3}{\log 2}
wrong  3 ¦ 2 ¦ \log_3 2 ¦ \log 3 ¦ \log_2 5 ¦ \ln 3
gold   (1+√5)/2
right  \frac{1+\sqrt5}{2} ¦ (1+√5)/2 ¦ \frac12+\frac{\sqrt{5}}{2} ¦ \frac{2}{\sqrt5-1}
wrong  \frac{1-\sqrt5}{2} ¦ 1 ¦ \frac{1+\sqrt5}{4} ¦ \frac{5}{2} ¦ 1.618
gold   \begin{cases}x=1\\y=2\end{cases}
right  x=1, y=2 ¦ (1,2) ¦ y=2, x=1 ¦ \begin{cases} x = 1 \\ y = 2 \end{cases}
right  x = 1 \text{ and } y = 2 ¦ (x,y)=(1,2) ¦ \left\{\begin{array}{l}x=1\\y=2\end{array}\right.
wrong  2 ¦ 1 ¦ x=2, y=1 ¦ (2,1) ¦ x=1 ¦ \{1,2\} ¦ a=1, b=2
gold   f(x)=\begin{cases}0 & x<0\\1 & x\ge0\end{cases}
right  f(x) = \begin{cases} 0, & x < 0 \\ 1, & x \geq 0 \end{cases}
right  \begin{cases}1 & x\ge 0\\0 & x<0\end{cases}
right  f(x)=\begin{cases}0&\text{if }x<0\\1&\text{if }0 \le x\end{cases}
wrong  0 ¦ 1 ¦ \begin{cases}1 & x<0\\0 & x\ge0\end{cases}
wrong  \begin{cases}0 & x\le 0\\1 & x>0\end{cases} ¦ \begin{cases}0 & x<1\\1 & x\ge1\end{cases}
gold   \begin{cases} n^2 & \text{if } n \text{ is even} \\ 0 & \text{otherwise}\end{cases}
right  \begin{cases} n^2 & \text{if } n \text{ is even} \\ 0 & \text{otherwise}\end{cases}
right  \begin{cases} n^{2}& \text{if } n \text{ is even} \\ 0 & \text{otherwise}\end{cases}
wrong  0 ¦ n^2 ¦ \begin{cases} n^2 & \text{if } n \text{ is odd} \\ 0 & \text{otherwise}\end{cases}
gold   2 \text{ red and } 3 \text{ blue}
right  2 \text{ red and } 3 \text{ blue}
wrong  2 ¦ 3 ¦ 5 ¦ 3 \text{ red and } 2 \text{ blue} ¦ 2 \text{ red}
gold   3 \text{ hours } 20 \text{ minutes}
right  3 \text{ hours } 20 \text{ minutes} ¦ 3 \text{ hours and } 20 \text{ minutes}
right  3 hours 20 minutes ¦ 3\text{ h } 20 \text{ min}
wrong  3 ¦ 20 ¦ 3 \text{ hours} ¦ 20 \text{ minutes} ¦ 3 \text{ hours } 25 \text{ minutes}
wrong  20 \text{ hours } 3 \text{ minutes} ¦ 320
gold   1, 2, \ldots, n
right  1, 2, \ldots, n ¦ 1,2,\dots,n ¦ 1, 2, ..., n
wrong  1 ¦ n ¦ 1, 3, 5, \ldots, 2n-1 ¦ 1,2 ¦ 1,2,n ¦ 1,2,\ldots,m ¦ 2,1,\ldots,n
gold   (k, 2k), k \in \mathbb{Z}
right  (k,2k), k\in\mathbb{Z} ¦ (t, 2t), t \in \mathbb{Z} ¦ (k, 2k) \text{ for } k \in \mathbb{Z}
right  (k,2k) \text{ where } k \text{ is an integer}
wrong  2 ¦ (1,2) ¦ (k, 3k), k\in\mathbb{Z} ¦ (2k,k), k \in \mathbb{Z} ¦ (k, 2k), k \in \mathbb{N}
wrong  (k,2k), k\in\mathbb{R} ¦ k
gold   5
right  5 ¦ x = 5 ¦ 5.0 ¦ (5) ¦ \text{5} ¦ 5 \text{ cm} ¦ 10/2 ¦ \frac{10}{2}
wrong  \neq 5 ¦ > 5 ¦ < 5 ¦ \ge 5 ¦ \leq 5 ¦ 7 \to 5 ¦ 10 \mid 5 ¦ \foo{3} 5 ¦ x > 5
wrong  \approx 5 \pm 1 ¦ 5 \pm 1 ¦ \pm 5 ¦ 5! ¦ 5e ¦ 5x ¦ 5i ¦ 5\pi ¦ 5^2 ¦ \sqrt5 ¦ x_5 ¦ 5_8 ¦ 5:1
wrong  1:5 ¦ 5' ¦ f(5) ¦ \{5,5,6\} ¦ (5,5) ¦ [0,5] ¦ 5 \text{ or } 6 ¦ 5 \pmod 7 ¦ \text{not } 5
wrong  \text{at least } 5 ¦ 5 \text{ or more} ¦ 5 \text{ million} ¦ 5\% 3 ¦ \lim 5 ¦ \sum 5
wrong  5 \cdot ¦ 5 + ¦ 5 / ¦ 5 \text{ dozen} ¦ 5\frac12 ¦ 0.5 ¦ 5, 5 ¦ 5 \neq 6 ¦ x \neq 5
wrong  \overline{5} ¦ \overline{5a} ¦ \vec{5} ¦ \{x \mid x = 5\} ¦ x \in \{5, 6\} ¦ \ln 5 ¦ |x| = 5
wrong  2x = 5 ¦ x^2 = 5 ¦ x + 1 = 5 ¦ y^2 + x = 5
gold   3t
right  3t ¦ 3 \cdot t ¦ t \cdot 3 ¦ t*3
wrong  3 ¦ t ¦ 3s ¦ 3T ¦ 3+t ¦ 3t^2 ¦ 2t
gold   x+3t
right  x+3t ¦ 3t+x ¦ x + 3 t
wrong  x+3 ¦ x ¦ 3t ¦ 3 ¦ x-3t ¦ x+3s
gold   x=t, y=2t
right  x = t, y = 2t ¦ y=2t, x=t ¦ (t, 2t)
wrong  x=t, y=2 ¦ y=t, x=2t ¦ x=t ¦ 2 ¦ (2t,t) ¦ x=1,y=2
gold   3 - t
right  3-t ¦ -t+3 ¦ -(t-3)
wrong  3 ¦ t ¦ -3 ¦ 3+t ¦ t - 3
gold   2g
right  2g ¦ g \cdot 2
wrong  2 ¦ 2h ¦ g
gold   \frac{1}{2}gh
right  \frac{gh}{2} ¦ \frac12 hg ¦ 0.5gh
wrong  \frac12 ¦ \frac12 g ¦ \frac12 h ¦ gh ¦ 0.5
gold   5m + 2s
right  2s+5m ¦ 5m+2s
wrong  5 ¦ 7 ¦ 5m ¦ 5+2 ¦ 5m+2
gold   12 \text{ m}
right  12 ¦ 12 m ¦ 12\,\mathrm{m} ¦ 12 \text{ meters} ¦ 12m
wrong  13 ¦ 12 \text{ cm} ¦ 12 \text{ s} ¦ 12x ¦ 12 \text{ m}^2
gold   12 \text{ cm}^2
right  12 ¦ 12 \text{ square cm} ¦ 12 \text{ cm}^{2} ¦ 12 cm² ¦ 12\text{ sq. cm}
right  12 \text{ square centimeters}
wrong  12 \text{ cm} ¦ 12 \text{ m}^2 ¦ 12^2 ¦ 144 ¦ 12 \text{ cm}^3
gold   x=2, y=3
right  x=2,y=3 ¦ y=3, x=2 ¦ (2,3) ¦ (x,y)=(2,3) ¦ x=2 \text{ and } y=3 ¦ x = 2,\; y = 3 ¦ x=2; y=3
wrong  (3,2) ¦ (x,y)=(3,2) ¦ x=3,y=2 ¦ 2 ¦ 3 ¦ x=2 ¦ \{2,3\} ¦ \{3,2\} ¦ x=2,y=4 ¦ x=2, z=3
gold   a = 1, b = -2, c = 3
right  (1,-2,3) ¦ c=3, b=-2, a=1 ¦ (a,b,c) = (1,-2,3) ¦ a=1,\ b=-2,\ c=3
wrong  (1,2,3) ¦ (3,-2,1) ¦ a=1,b=-2 ¦ 1 ¦ -2 ¦ a=3,b=-2,c=1
gold   \langle 1,2,3\rangle
right  \langle 1, 2, 3 \rangle ¦ (1,2,3) ¦ ⟨1,2,3⟩ ¦ \begin{pmatrix}1\\2\\3\end{pmatrix}
right  \left\langle 1,2,3 \right\rangle ¦ \mathbf{i}+2\mathbf{j}+3\mathbf{k}
right  \hat{i}+2\hat{j}+3\hat{k} ¦ <1,2,3> ¦ [1,2,3]
wrong  \langle 1,2,5\rangle ¦ 1.2 ¦ 1 ¦ 123 ¦ \langle 3,2,1\rangle ¦ \{1,2,3\} ¦ \langle 1,2\rangle
wrong  \langle 1,2,-3\rangle ¦ 1,2,3
gold   \langle 3, 5 \rangle
right  \langle 3,5\rangle ¦ (3,5)
wrong  \langle 5,3\rangle ¦ 3.5 ¦ 3 ¦ [3,5] ¦ 3<5 ¦ \langle 3,5,0\rangle
gold   1e5
right  100000 ¦ 1e5 ¦ 10^5 ¦ 1 \times 10^5 ¦ 1E5 ¦ 1e+05
wrong  5e ¦ 15 ¦ 1 ¦ 5 ¦ e^5 ¦ 1e6 ¦ e
gold   1e-07
right  10^{-7} ¦ 1e-7 ¦ 0.0000001 ¦ 1 \times 10^{-7} ¦ 1.0e-07
wrong  1 ¦ -7 ¦ e-7 ¦ 1e7 ¦ 1e-6 ¦ 7 ¦ 0
gold   6.02e23
right  6.02 \times 10^{23} ¦ 602000000000000000000000 ¦ 6.02e23 ¦ 6.02\cdot10^{23}
wrong  6.02 ¦ 23 ¦ 6.02 \times 10^{22} ¦ 6.02e
gold   \textbf{(C)}\ 12
right  \textbf{(C)}\ 12 ¦ C ¦ 12 ¦ (C) ¦ \text{(C)} ¦ (C)\ 12 ¦ \text{C} ¦ \textbf{(C) }12 ¦ C. 12
right  C) 12
wrong  B ¦ 13 ¦ \textbf{(B)}\ 12 ¦ \textbf{(C)}\ 13 ¦ D ¦ 1 ¦ 2 ¦ (12)C
gold   C
right  (C)\ 12 ¦ C ¦ (C) ¦ \textbf{(C)} ¦ \text{C} ¦ C. ¦ C) ¦ \mathrm{C} ¦ \textbf{C}
wrong  (D)\ 12 ¦ c ¦ 12 ¦ D ¦ ABC ¦ A, C ¦ C+1 ¦ 2C ¦ \text{A or C}
gold   2i
right  (1+i)^2 ¦ 2i ¦ i \cdot 2 ¦ 2\mathrm{i} ¦ \sqrt{-4}
wrong  2 ¦ -2i ¦ i ¦ 2j ¦ -2
gold   -1
right  e^{i\pi} ¦ i^2 ¦ -1 ¦ \cos\pi ¦ −1
wrong  1 ¦ i ¦ e^{\pi} ¦ e^{2i\pi} ¦ i^4
gold   |3+4i|
right  5 ¦ |3-4i|
wrong  3+4i ¦ 7 ¦ 25 ¦ |3+5i|
gold   3+4i
right  4i+3 ¦ 3 + 4 i ¦ 3+4\mathrm{i} ¦ z = 3+4i
wrong  3-4i ¦ 4+3i ¦ 7 ¦ 3 ¦ 7i ¦ 5
gold   \frac{1}{2} + \frac{\sqrt{3}}{2}i
right  \frac{1+i\sqrt3}{2} ¦ e^{i\pi/3} ¦ \cos\frac{\pi}{3}+i\sin\frac{\pi}{3}
right  \frac12+\frac{i\sqrt3}{2}
wrong  \frac12 ¦ \frac12-\frac{\sqrt3}{2}i ¦ \frac{\sqrt3}{2}+\frac12 i
gold   45
right  45° ¦ 45^\circ ¦ 45 \text{ degrees} ¦ 45^{\circ} ¦ 45\degree
wrong  54° ¦ 45' ¦ \frac{\pi}{4}
gold   (-\infty, 3]
right  (-∞, 3] ¦ (-\infty,3] ¦ x \le 3 ¦ x ≤ 3 ¦ \left(-\infty, 3\right] ¦ ]-\infty,3]
right  \{x \mid x \leq 3\} ¦ \{x : x \le 3\}
wrong  (-∞, 3) ¦ 3 ¦ [3,\infty) ¦ x<3 ¦ x \ge 3 ¦ (-\infty,-3] ¦ -3 ¦ \{x \mid x < 3\}
wrong  [-3, \infty)
gold   x<2 \text{ or } x>3
right  (-\infty,2)\cup(3,\infty) ¦ x>3 \text{ or } x<2 ¦ x<2 or x>3 ¦ (3,\infty)\cup(-\infty,2)
right  (−∞,2)∪(3,∞) ¦ x \in (-\infty,2)\cup(3,\infty) ¦ \mathbb{R} \setminus [2,3]
wrong  x<2 ¦ x>3 ¦ (2,3) ¦ 2<x<3 ¦ x<2 \text{ and } x>3 ¦ (-\infty,2]\cup(3,\infty)
wrong  (-\infty,3)\cup(2,\infty) ¦ y<2 \text{ or } y>3 ¦ 2, 3
gold   66\frac{2}{3}\%
right  \frac{200}{3}\% ¦ 66\frac23\% ¦ 66 \frac{2}{3} \% ¦ \frac{200}{3}
wrong  66 ¦ \frac23\% ¦ 66.67\% ¦ 66\% ¦ 66\frac13\% ¦ 2/3\%
gold   907
right  2907 \equiv 907 \pmod{1000} ¦ 907
wrong  2907 ¦ 2907 \equiv 908 \pmod{1000} ¦ 1000 ¦ x \equiv 907 \pmod{1000}, y
gold   x \equiv 3 \pmod 7
right  x \equiv 3 \pmod{7} ¦ x ≡ 3 (mod 7) ¦ x \equiv 10 \pmod 7 ¦ x \equiv -4 \pmod{7}
wrong  3 ¦ 7 ¦ x = 3 ¦ x \equiv 4 \pmod 7 ¦ x \equiv 3 \pmod 8 ¦ y \equiv 3 \pmod 7
wrong  x \equiv 3, 4 \pmod 7
gold   \frac{\pi}{4}
right  pi/4 ¦ π/4 ¦ \pi/4 ¦ 0.25\pi ¦ \arctan 1 ¦ \tan^{-1}(1)
wrong  4 ¦ \pi ¦ 1/4 ¦ p/4 ¦ 0.785 ¦ \frac{\pi}{2} ¦ 45^\circ
gold   e^2
right  exp(2) ¦ e^{2} ¦ \exp(2) ¦ e²
wrong  e ¦ 2 ¦ 2e ¦ 7.389 ¦ exp(3) ¦ x^2
gold   \sqrt[3]{2} + 1
right  1 + 2^{1/3} ¦ ∛2 + 1 ¦ \sqrt[3]{2}+1 ¦ 2^{\frac13}+1
wrong  \sqrt{2}+1 ¦ 2 ¦ 3 ¦ \sqrt[3]{3}+1 ¦ \sqrt[3]{2+1} ¦ 3\sqrt2+1 ¦ 2.26
gold   \frac{a+b}{c}
right  \frac{b+a}{c} ¦ (a+b)/c ¦ \frac{a}{c}+\frac{b}{c}
wrong  \frac{a+b}{d} ¦ a+b/c ¦ \frac{a-b}{c} ¦ \frac{c}{a+b} ¦ \frac{A+b}{c} ¦ a+b
gold   x^2 - 5x + 6
right  (x-2)(x-3) ¦ 6-5x+x^2 ¦ x^{2}-5x+6 ¦ x² − 5x + 6 ¦ x*x-5*x+6 ¦ y = x^2-5x+6 ¦ (x - 3)(x - 2)
right  f(x) = x^2-5x+6
wrong  x^2+5x+6 ¦ x^2-5x ¦ 6 ¦ (x-2)(x+3) ¦ x^2-5x+5 ¦ y^2-5y+6 ¦ x^3-5x+6 ¦ 2,3 ¦ x^2 - 5x + 6 = 0
wrong  x^2
gold   y = 2x + 3
right  y=3+2x ¦ 2x - y + 3 = 0 ¦ y - 2x = 3 ¦ 2x+3 = y
wrong  y=2x-3 ¦ y=3x+2 ¦ x = 2y+3 ¦ 2x+3y=0 ¦ y = 2 ¦ 3 ¦ y=2x+4 ¦ y \le 2x+3 ¦ y = -2x+3 ¦ 2
gold   x^2 + y^2 = 25
right  y^2+x^2=25 ¦ 25 = x^2+y^2 ¦ x^2+y^2-25=0 ¦ 2x^2+2y^2=50
wrong  25 ¦ 5 ¦ x^2+y^2=5 ¦ x^2-y^2=25 ¦ x^2+y^2 ¦ x^2+y^2<25 ¦ x^2+z^2=25
gold   \frac{x^2}{9} + \frac{y^2}{4} = 1
right  4x^2+9y^2=36 ¦ \frac{y^2}{4}+\frac{x^2}{9}=1
wrong  \frac{x^2}{4}+\frac{y^2}{9}=1 ¦ 1 ¦ \frac{x^2}{9}-\frac{y^2}{4}=1 ¦ 9x^2+4y^2=36
gold   a_n = 2^n - 1
right  a_n = -1 + 2^n ¦ 2^n-1 ¦ a_{n}=2^{n}-1
wrong  a_n=2^n+1 ¦ 2^n ¦ a_n=2^{n-1} ¦ b_n = 2^n-1 ¦ 1 ¦ a_n = 2^m-1 ¦ 2n-1
gold   f(x) = x^2 + 1
right  f(x)=1+x^2 ¦ x^2+1 ¦ f(x) = x^{2}+1
wrong  f(x)=x^2-1 ¦ g(x) = x^2+1 ¦ f(x)=x^2 ¦ f(y)=x^2+1 ¦ 1
gold   \log_2 5
right  \frac{\ln5}{\ln2} ¦ \log_{2}{5} ¦ log_2(5)
wrong  \log_5 2 ¦ \log_2 3 ¦ \log 5 ¦ 5 ¦ 2 ¦ 2.32
gold   \frac{1}{3}\ln 2
right  \ln\sqrt[3]{2} ¦ \frac{\ln 2}{3} ¦ \ln 2^{1/3}
wrong  \ln 2 ¦ \frac13 ¦ \ln\frac23 ¦ \frac13\log 2 ¦ \frac{1}{2}\ln 3
gold   \sin^2 x
right  (\sin x)^2 ¦ 1-\cos^2 x ¦ \sin^{2}(x) ¦ \frac{1-\cos 2x}{2}
wrong  \sin x^2 ¦ \sin 2x ¦ \cos^2 x ¦ 2\sin x ¦ \sin^2 y ¦ \sin^3 x
gold   \{1, 2, 3\}
right  \{3,1,2\} ¦ 1,2,3 ¦ {1,2,3} ¦ \{ 1,\ 2,\ 3 \} ¦ \left\{1,2,3\right\} ¦ 3, 2, 1
right  1, 2, \text{ and } 3 ¦ x \in \{1,2,3\}
wrong  (1,2,3) ¦ \{1,2\} ¦ \{1,2,3,4\} ¦ \{1,2,4\} ¦ 123 ¦ 6 ¦ [1,3] ¦ 1 ¦ \{-1,2,3\}
wrong  1 \text{ or } 2
gold   \{-2, 2\}
right  \pm 2 ¦ 2, -2 ¦ x = \pm 2 ¦ x=2 \text{ or } x=-2 ¦ x = 2, -2 ¦ -2 \text{ and } 2 ¦ ±2
wrong  2 ¦ -2 ¦ (-2,2) ¦ [-2,2] ¦ \{2\} ¦ \pm 3 ¦ \{-2,2,0\} ¦ 4
gold   [-2, 2]
right  -2 \le x \le 2 ¦ [-2,2] ¦ x \in [-2,2] ¦ |x| \le 2
wrong  (-2,2) ¦ [-2,2) ¦ \{-2,2\} ¦ -2<x<2 ¦ [2,-2] ¦ [-2,3] ¦ 2 ¦ x \ge -2
gold   (1, 2)
right  (1,2) ¦ (1, 2.0) ¦ \left(1, 2\right) ¦ (x,y) = (1,2) ¦ x=1, y=2
wrong  (2,1) ¦ [1,2] ¦ (1,2] ¦ \{1,2\} ¦ (1,2,3) ¦ 1.2 ¦ (1,-2) ¦ 12 ¦ 1,2
gold   (1, \infty)
right  (1,∞) ¦ x>1 ¦ 1<x ¦ (1, +\infty) ¦ \{x : x > 1\} ¦ 1 < x < \infty
wrong  [1,\infty) ¦ x \ge 1 ¦ (1,2) ¦ (-\infty,1) ¦ \infty ¦ (-1,\infty) ¦ x<1
gold   (-\infty, -1) \cup [2, \infty)
right  [2,∞) ∪ (−∞,−1) ¦ x < -1 \text{ or } x \geq 2 ¦ (-\infty,-1)\cup[2,+\infty)
right  \mathbb{R}\setminus[-1,2)
wrong  (-\infty,-1]\cup[2,\infty) ¦ [-1,2) ¦ (-\infty,1)\cup[2,\infty) ¦ (-\infty,-1)\cup(2,\infty)
wrong  (-\infty,-1) ¦ (-\infty, -1)\cap[2,\infty) ¦ x<-1 \text{ and } x \ge 2
gold   \mathbb{R} \setminus \{0\}
right  (-\infty,0)\cup(0,\infty) ¦ x \ne 0 ¦ \mathbb{R}\setminus\{0\} ¦ \mathbb{R} - \{0\}
wrong  \mathbb{R} ¦ \{0\} ¦ 0 ¦ (0,\infty) ¦ \mathbb{R}\setminus\{1\} ¦ \mathbb{Z}\setminus\{0\}
gold   \emptyset
right  \varnothing ¦ \{\} ¦ ∅ ¦ \{ \}
wrong  0 ¦ \{0\} ¦ \{\emptyset\} ¦ \phi ¦ \text{none}
gold   (2, 3), (3, 2)
right  (3,2),(2,3) ¦ \{(2,3),(3,2)\} ¦ (2,3) \text{ and } (3,2) ¦ (x,y) = (2,3), (3,2)
wrong  (2,3) ¦ (3,2) ¦ 2,3 ¦ (2,3),(2,3) ¦ (2,3),(3,4) ¦ (2,2),(3,3) ¦ (2,3,3,2) ¦ ((2,3),(3,2))
gold   \frac{5 \pm \sqrt{13}}{6}
right  \frac{5+\sqrt{13}}{6}, \frac{5-\sqrt{13}}{6} ¦ x = \frac{5\pm\sqrt{13}}{6}
right  \frac56 \pm \frac{\sqrt{13}}{6} ¦ \frac{5 \mp \sqrt{13}}{6}
wrong  \frac{5+\sqrt{13}}{6} ¦ \frac{-5\pm\sqrt{13}}{6} ¦ \frac{5\pm\sqrt{11}}{6}
wrong  \frac{5\pm\sqrt{13}}{2} ¦ 5 \pm \sqrt{13}
gold   3x^2 - 2x + C
right  C + 3x^2 - 2x ¦ 3x^{2}-2x+C
wrong  3x^2-2x ¦ 3x^2+2x+C ¦ 3x^2-2x+D ¦ 3x^2 - 2x + 1
gold   \binom{10}{3}
right  120 ¦ \frac{10!}{3!7!} ¦ \binom{10}{7} ¦ {10 \choose 3}
wrong  10 ¦ 3 ¦ \binom{10}{4} ¦ \frac{10}{3} ¦ 210 ¦ 30
gold   2^{100}
right  2^{100} ¦ 4^{50} ¦ 2 \cdot 2^{99} ¦ (2^{50})^2
wrong  2^{10} ¦ 100 ¦ 2 ¦ 200 ¦ 2^{101} ¦ 100^2 ¦ 2^{99}
gold   2^{2019} - 1
right  -1 + 2^{2019} ¦ 2^{2019}-1
wrong  2^{2019} ¦ 2^{2019}+1 ¦ 2^{2018}-1 ¦ 2^{2019-1} ¦ 1
gold   100!
right  100! ¦ 100 \cdot 99!
wrong  100 ¦ 99! ¦ 101! ¦ 1
gold   \frac{100!}{50!50!}
right  \binom{100}{50} ¦ \frac{100!}{(50!)^2}
wrong  \frac{100!}{50!} ¦ 2! ¦ \binom{100}{49}
gold   n!
right  n! ¦ n \cdot (n-1)!
wrong  n ¦ (n-1)! ¦ m! ¦ n^n
gold   \frac{n(n+1)(2n+1)}{6}
right  \frac{2n^3+3n^2+n}{6} ¦ \frac{n(n+1)(2n+1)}{6} ¦ \sum_{k=1}^{n}k^2
wrong  \frac{n(n+1)}{2} ¦ \frac{n(n+1)(2n-1)}{6} ¦ \frac{n(n+1)(2n+1)}{3} ¦ \frac{m(m+1)(2m+1)}{6}
gold   \sum_{k=1}^{n} k^2
right  \sum_{j=1}^n j^2 ¦ \sum_{k=1}^{n}k^{2}
wrong  \sum_{k=1}^{n} k ¦ \sum_{k=0}^{n-1} k^2 ¦ k^2 ¦ \sum_{k=1}^{m} k^2
gold   (-1)^n
right  (-1)^n ¦ (-1)^{n+2} ¦ \cos(n\pi)
wrong  -1 ¦ 1 ¦ (-1)^{n+1} ¦ -1^n ¦ (1)^n ¦ (-1)^m
gold   \lfloor x \rfloor
right  \lfloor x\rfloor ¦ ⌊x⌋
wrong  x ¦ \lceil x \rceil ¦ \lfloor y \rfloor ¦ [x]
gold   |x - 3|
right  |3-x| ¦ \lvert x-3\rvert ¦ \left|x-3\right|
wrong  x-3 ¦ 3-x ¦ |x+3| ¦ |y-3| ¦ |x|-3
gold   0.\overline{36}
right  \frac{4}{11} ¦ 0.\overline{36} ¦ 0.3\overline{63} ¦ 0.(36)
wrong  0.36 ¦ 36 ¦ 0.\overline{63} ¦ 0.3636 ¦ 0.\overline{3} ¦ \overline{36}
gold   52_8
right  52_8 ¦ 52_{8} ¦ (52)_8 ¦ 52_{\text{eight}}
wrong  52 ¦ 42 ¦ 52_9 ¦ 25_8 ¦ 8 ¦ 52_{10} ¦ 528 ¦ 52/8
gold   6:30 \text{ p.m.}
right  6:30 \text{ p.m.} ¦ 6:30 PM ¦ 6:30 p.m. ¦ 6:30\text{ pm}
wrong  6:30 \text{ a.m.} ¦ 6:30 AM ¦ 6:35 \text{ p.m.} ¦ 6 ¦ 30 ¦ 5:30 \text{ p.m.}
gold   3:4
right  3:4 ¦ 3 : 4
wrong  4:3 ¦ 3 ¦ 4 ¦ 3:5 ¦ 34 ¦ 7 ¦ 3.4
gold   2:3:5
right  2 : 3 : 5
wrong  5:3:2 ¦ 2:3 ¦ 10 ¦ 2:3:4
gold   \$12.50
right  12.50 ¦ 12.5 ¦ \$12.5 ¦ \$ 12.50 ¦ 12.50 \text{ dollars} ¦ $12.50
wrong  12 ¦ 50 ¦ 12.05 ¦ \$125 ¦ €12.50 ¦ 12.50 \text{ cents} ¦ 1250
gold   15 \text{ miles per hour}
right  15 ¦ 15 miles per hour ¦ 15 \frac{\text{miles}}{\text{hour}}
wrong  15 \text{ miles} ¦ 15 \text{ km/h} ¦ 51 ¦ 15 \text{ hours}
gold   9.8 \text{ m/s}^2
right  9.8 ¦ 9.8 \text{ m/s}^{2} ¦ 9.8 m/s² ¦ 9.8\,\mathrm{m/s^2} ¦ 9.8\ \mathrm{m}/\mathrm{s}^2
wrong  9.8 \text{ m/s} ¦ 9 ¦ 98 ¦ 8.9
gold   \text{Monday}
right  Monday ¦ \text{monday} ¦ \textbf{Monday} ¦ \mathrm{Monday}
wrong  Tuesday ¦ M ¦ \text{Sunday} ¦ 1 ¦ \text{Monday or Tuesday}
gold   \text{Yes}
right  yes ¦ \text{Yes} ¦ YES ¦ \text{yes.}
wrong  no ¦ \text{No} ¦ y ¦ 1 ¦ \text{yes and no}
gold   \text{even}
right  even ¦ \text{Even} ¦ \textbf{even}
wrong  odd ¦ \text{odd} ¦ e ¦ \text{neither even nor odd} ¦ \text{not even}
gold   \text{no solution}
right  \text{No solution} ¦ no solution
wrong  \text{one solution} ¦ 0 ¦ \text{no} ¦ \text{solution}
gold   ABC
right  ABC
wrong  ACB ¦ A ¦ abc ¦ BCA ¦ A,B,C ¦ CBA
gold   \angle ABC
right  \angle ABC ¦ ∠ABC
wrong  \angle ACB ¦ ABC ¦ B
gold   AB = 5
right  5 ¦ AB=5 ¦ 5 = AB
wrong  AC = 5 ¦ 6 ¦ AB = 6
gold   x_1 + x_2
right  x_2+x_1 ¦ x_{1}+x_{2} ¦ x₁ + x₂
wrong  x_1 ¦ x_1+x_3 ¦ x_1-x_2 ¦ x1+x2x ¦ 3 ¦ 2x
gold   \alpha + \beta
right  \beta+\alpha ¦ α+β
wrong  \alpha ¦ \alpha-\beta ¦ a+b ¦ \alpha+\gamma
gold   4\pi
right  4π ¦ \pi \cdot 4 ¦ 4\pi \text{ cm}^2 ¦ 4*pi ¦ 4pi ¦ A = 4\pi
wrong  4 ¦ \pi ¦ 4p ¦ 2\pi ¦ 12.56 ¦ 4\pi^2 ¦ 4\pi r ¦ 4 + \pi
gold   12\pi - 9\sqrt{3}
right  -9\sqrt3+12\pi ¦ 3(4\pi-3\sqrt3) ¦ 12π − 9√3
wrong  12\pi ¦ 12\pi+9\sqrt3 ¦ 9\sqrt3-12\pi ¦ 12 ¦ 12\pi-9\sqrt2 ¦ 12-9
gold   1.5 \times 10^{-3}
right  0.0015 ¦ 1.5e-3 ¦ 1.5 \cdot 10^{-3} ¦ 1.5×10⁻³ ¦ \frac{3}{2000}
wrong  1.5 ¦ 1.5\times10^3 ¦ 1.5 \times 10^{-4} ¦ -3 ¦ 15 \times 10^{-3}
gold   123,456
right  123456 ¦ 123{,}456 ¦ 123\,456 ¦ 123 456 ¦ 123,456.0
wrong  123 ¦ 456 ¦ 123.456 ¦ 123,465 ¦ (123,456)
gold   100, 200, 300
right  100,200,300 ¦ 300, 200, 100 ¦ \{100,200,300\}
wrong  100200300 ¦ 100 ¦ 600
gold   -\frac{7}{3}
right  \frac{-7}{3} ¦ -7/3 ¦ -2\frac13 ¦ \frac{7}{-3} ¦ −7/3
wrong  \frac73 ¦ -\frac37 ¦ -7 ¦ -2.33 ¦ 2\frac13 ¦ -\frac{7}{4}
gold   k\pi, k \in \mathbb{Z}
right  n\pi, n \in \mathbb{Z} ¦ k\pi \text{ for } k \in \mathbb{Z} ¦ x = k\pi, k\in\mathbb{Z}
right  k \pi \text{ for any integer } k ¦ k\pi \text{ where } k \text{ is an integer}
wrong  \pi ¦ k\pi, k\in\mathbb{N} ¦ 2k\pi, k \in\mathbb{Z} ¦ \frac{k\pi}{2}, k\in\mathbb{Z} ¦ k
wrong  n\pi, k\in\mathbb{Z}
gold   \frac{\pi}{6} + 2k\pi, k \in \mathbb{Z}
right  2k\pi + \frac{\pi}{6}, k \in \mathbb{Z} ¦ \frac\pi6+2n\pi, n\in\mathbb{Z}
wrong  \frac{\pi}{6} ¦ \frac{\pi}{3}+2k\pi, k\in\mathbb{Z} ¦ \frac{\pi}{6}+k\pi, k\in\mathbb{Z}
wrong  -\frac{\pi}{6}+2k\pi, k\in\mathbb{Z}
gold   3, 5, 7
right  7,5,3 ¦ 3,5 and 7 ¦ 3; 5; 7 ¦ \{3,5,7\}
wrong  3,5 ¦ 3,5,7,9 ¦ 3,5,8 ¦ 357 ¦ 15 ¦ (7,5,3) ¦ 3
gold   a \le 3
right  a ≤ 3 ¦ 3 \ge a ¦ (-\infty,3] ¦ a \leqslant 3
wrong  a<3 ¦ a \ge 3 ¦ 3 ¦ a \le 4 ¦ b \le 3 ¦ a = 3
gold   1 < a \le 4
right  4 \ge a > 1 ¦ (1,4] ¦ a > 1 \text{ and } a \le 4
wrong  1<a<4 ¦ 1 \le a \le 4 ¦ [1,4] ¦ a>1 ¦ a \le 4 ¦ 1 < b \le 4 ¦ 4
gold   x + y < 5
right  y+x<5 ¦ 5 > x+y ¦ 2x+2y<10
wrong  x+y>5 ¦ x+y \le 5 ¦ 5 ¦ x+y<6 ¦ x-y<5 ¦ -x-y<-5
gold   \sqrt{x^2+1}
right  \sqrt{1+x^2} ¦ (x^2+1)^{1/2}
wrong  x+1 ¦ \sqrt{x^2-1} ¦ \sqrt{x+1} ¦ \sqrt{y^2+1} ¦ x^2+1
gold   \frac{1}{2}\begin{pmatrix}1\\-1\end{pmatrix}
right  \begin{pmatrix}1/2\\-1/2\end{pmatrix} ¦ \begin{pmatrix}0.5\\-0.5\end{pmatrix}
wrong  \begin{pmatrix}1\\-1\end{pmatrix} ¦ \begin{pmatrix}1/2\\1/2\end{pmatrix}
gold   \overline{AB}
right  \overline{AB}
wrong  AB ¦ \overline{AC} ¦ \overrightarrow{AB}
gold   \vec{a} + \vec{b}
right  \vec{b}+\vec{a} ¦ \vec a + \vec b
wrong  a+b ¦ \vec{a} ¦ \vec{a}-\vec{b} ¦ \vec{a}+\vec{c}
gold   2\mathbf{i} - 3\mathbf{j}
right  (2,-3) ¦ \langle 2,-3\rangle ¦ -3\mathbf{j}+2\mathbf{i} ¦ 2\hat{i}-3\hat{j}
right  2\vec{i}-3\vec{j} ¦ \begin{pmatrix}2\\-3\end{pmatrix}
wrong  2 ¦ -3 ¦ (2,3) ¦ (-3,2) ¦ 2\mathbf{i}+3\mathbf{j} ¦ 2i-3 ¦ 2\mathbf{j}-3\mathbf{i}
gold   \{x \mid x \ge 0\}
right  [0,\infty) ¦ x \ge 0 ¦ \{y : y \geq 0\} ¦ \{x \in \mathbb{R} \mid x \ge 0\}
wrong  (0,\infty) ¦ 0 ¦ \{x \mid x > 0\} ¦ \{x \mid x \le 0\} ¦ \{0\}
gold   \text{June 20}
right  June 20 ¦ \text{june 20}
wrong  20 ¦ \text{June 21} ¦ \text{July 20} ¦ June ¦ 6/20
gold   3 \frac{1}{8}
right  \frac{25}{8} ¦ 3.125 ¦ 3\frac18 ¦ 3 1/8
wrong  \frac{3}{8} ¦ 3 ¦ \frac18 ¦ 31/8 ¦ 3\frac{1}{7} ¦ \frac{1}{8}
gold   \frac{\sqrt{6}+\sqrt{2}}{4}
right  \cos 15^\circ ¦ \sin 75^\circ ¦ \cos\frac{\pi}{12} ¦ \frac{1+\sqrt3}{2\sqrt2}
wrong  \cos 15 ¦ \sin 15^\circ ¦ \frac{\sqrt6-\sqrt2}{4} ¦ \frac{\sqrt8}{4}
gold   \tan 60^\circ
right  \sqrt3 ¦ \tan\frac{\pi}{3}
wrong  60 ¦ \tan 60 ¦ \sqrt2 ¦ 1
gold   37.5\%
right  37.5 ¦ 0.375 ¦ \frac{3}{8} ¦ 37.5 % ¦ 37.50\% ¦ 37.5 \text{ percent}
wrong  3.75 ¦ 375\% ¦ 37 ¦ 37\% ¦ 5
gold   (x+2)(x-3)
right  x^2-x-6 ¦ (x-3)(x+2)
wrong  (x-2)(x+3) ¦ x+2 ¦ x-3 ¦ -6 ¦ (x+2),(x-3) ¦ (x+2)(x-3)=0
gold   10^{10^{10}}
right  10^{10^{10}} ¦ 10^{(10^{10})}
wrong  10 ¦ 10^{100} ¦ 10^{10^9} ¦ 10^{10} ¦ 10^{10^{11}}
gold   p \land q
right  p \land q ¦ p ∧ q
wrong  p \lor q ¦ p ¦ p, q ¦ p \text{ or } q
gold   \frac{dy}{dx} = 2x
right  \frac{dy}{dx}=2x
wrong  \frac{dy}{dx} = 3x ¦ 2x y ¦ 2
gold   \int_0^1 x\,dx
right  \int_0^1 x \, dx
wrong  0 ¦ 1 ¦ x ¦ \int_0^2 x dx
gold   \lim_{x \to 0} f(x)
wrong  0 ¦ f(0) ¦ x
gold   (0,0), (1,1)
right  (1,1) and (0,0) ¦ (0,0) \text{ and } (1,1)
wrong  (0,0) ¦ 0,1 ¦ (0,1),(1,0) ¦ (0,0),(1,1),(2,2) ¦ (0,0),(1,-1)
gold   m/n
right  \frac{m}{n} ¦ m \div n
wrong  n/m ¦ m ¦ mn ¦ m-n
gold   5 \text{ apples}
right  5 ¦ 5 apples
wrong  6 ¦ 5 \text{ oranges} ¦ 6 \text{ apples}
gold   5³
right  125 ¦ 5^3
wrong  5 ¦ 3 ¦ 15 ¦ 5^2
gold   ∛5
right  \sqrt[3]{5} ¦ 5^{1/3}
wrong  5 ¦ \sqrt5 ¦ 3\sqrt5
gold   2¾
right  2.75 ¦ \frac{11}{4} ¦ 2\frac34
wrong  2 ¦ ¾ ¦ \frac{3}{4} ¦ 2.34 ¦ 234
gold   ⅔
right  \frac23 ¦ 2/3 ¦ ⅔
wrong  2 ¦ 3 ¦ \frac32 ¦ 0.67
gold   7÷2
right  3.5 ¦ \frac72
wrong  7 ¦ 2 ¦ 72
gold   √(2+√3)
right  \sqrt{2+\sqrt3} ¦ \frac{\sqrt6+\sqrt2}{2}
wrong  \sqrt2+\sqrt3 ¦ 2 ¦ \sqrt{5} ¦ \sqrt{2-\sqrt3}
gold   3√2/2
right  \frac{3\sqrt2}{2} ¦ \frac{3}{\sqrt2}
wrong  3 ¦ \frac32 ¦ 3\sqrt{2} ¦ \sqrt{2}/2
gold   85√3
right  85\sqrt{3} ¦ √3·85 ¦ 85√3
wrong  85 ¦ 3 ¦ 85\sqrt2 ¦ 853 ¦ 255 ¦ 85+\sqrt3
gold   x²y
right  yx^2 ¦ x^2y
wrong  x^2 ¦ xy^2 ¦ 2xy ¦ x2y ¦ y
gold   a₁ + a₂
right  a_1+a_2
wrong  a_1 ¦ a_1+a_3 ¦ 2a ¦ 3
gold   x₁ = 2, x₂ = 3
right  x_1=2,x_2=3 ¦ x_2 = 3, x_1 = 2
wrong  x_1=3,x_2=2 ¦ 2 ¦ x_1=2 ¦ x=2
gold   5 \text{ feet } 3 \text{ inches}
right  5 \text{ ft } 3 \text{ in} ¦ 5 feet 3 inches ¦ 5 \text{ feet and } 3 \text{ inches}
wrong  5 ¦ 3 ¦ 5 \text{ feet} ¦ 3 \text{ feet } 5 \text{ inches} ¦ 53
gold   1 \text{ hour and } 15 \text{ minutes}
right  1 \text{ hour } 15 \text{ minutes} ¦ 1 hour and 15 minutes
wrong  1 ¦ 15 ¦ 1 \text{ hour and } 50 \text{ minutes} ¦ 1.15
gold   2 \text{ dozen}
right  2 \text{ dozen}
wrong  2 ¦ 24 x
gold   3 \text{ tens and } 4 \text{ ones}
right  3 \text{ tens and } 4 \text{ ones}
wrong  3 ¦ 4 ¦ 4 \text{ tens and } 3 \text{ ones} ¦ 7
gold   \{1,2,\ldots,10\}
right  \{1, 2, \dots, 10\} ¦ \{1,2,...,10\}
wrong  10 ¦ \{1,2,10\} ¦ \{1,2,\ldots,11\} ¦ \{1,3,\ldots,10\} ¦ 1
gold   2, 4, 6, \ldots
right  2,4,6,\dots
wrong  2 ¦ 2,4,6 ¦ 2,4,8,\ldots ¦ 6
gold   (2t+1, t-3), t \in \mathbb{R}
right  (1+2t, -3+t), t\in\mathbb{R} ¦ (2s+1,s-3), s \in \mathbb{R}
wrong  (1,-3) ¦ (2t+1,t+3), t\in\mathbb{R} ¦ (t-3,2t+1), t\in\mathbb{R} ¦ 2t+1
wrong  (2s+1,t-3), t \in \mathbb{R}
gold   n \ge 2
right  n \geq 2 ¦ 2 \le n ¦ [2,\infty)
wrong  2 ¦ n > 2 ¦ n = 2 ¦ n \ge 3 ¦ m \ge 2 ¦ n \le 2
gold   5
right  \lfloor 5.7 \rfloor ¦ |{-5}| ¦ \sqrt{25} ¦ {5} ¦ 5.00 ¦ +5 ¦ \mathbf{5} ¦ \displaystyle 5
right  5\,
wrong  \lt 5 ¦ 5 \to \infty ¦ \sim 5 ¦ \cancel{3} 5 ¦ 10 | 5 ¦ 5 | 10 ¦ \not= 5 ¦ 5 \ll 6
wrong  x \propto 5 ¦ 5 \Rightarrow 6 ¦ 5 \quad 6 ¦ 5 \\ 6 ¦ 5;6 ¦ 5 \circ 6 ¦ \exists 5 ¦ f: 5
wrong  5 \times ¦ 5 \text{?} 6 ¦ \frac{5}{} ¦ 5^ ¦ 5_ ¦ (5 ¦ 5) ¦ [5 ¦ \{5 ¦ 5 \text{ if } x>0
wrong  \text{if } 5 ¦ \text{max } 5, 6 ¦ \text{no. } 5 6 ¦ 5 \pm 0.1 ¦ 5 \text{ to } 7 ¦ 5-7x
wrong  5\text{--}7 ¦ 5 \text{ remainder } 2 ¦ 5 R 2 ¦ 5 \text{ R } 2
wrong  \text{between } 5 \text{ and } 6 ¦ \text{undefined for } 5 ¦ 5\angle 30^\circ ¦ 5\hat{x}
wrong  \hat{5} ¦ \bar{5} ¦ 5^{\text{th}} ¦ 5\text{th} ¦ \#5 ¦ 5\& ¦ 5^* ¦ 5\dagger ¦ 5^{+}
wrong  \sqrt[5]{} ¦ 5\infty ¦ \infty ¦ -\infty ¦ (-\infty,5) ¦ \emptyset ¦ \text{five or six}
wrong  \text{All but } 5 ¦ x=5 \text{ or } x=-5 ¦ x=5, y=5 ¦ (x,y)=(5,5) ¦ 5 \in \mathbb{Z}
wrong  x \in \mathbb{Z} ¦ 5 \cup 6 ¦ \{5\} \cup \{6\} ¦ 5 \land 6 ¦ \neg 5 ¦ 5 \mod 3 ¦ a_5
wrong  a_n = 5n ¦ 5n ¦ n = 5k ¦ y = 5x ¦ f(x) = 5x ¦ 5x = 1 ¦ x = 5 + y
gold   \textbf{(A) } \frac12
right  A ¦ \frac12 ¦ \textbf{(A)}\ \frac{1}{2} ¦ (A) ¦ 0.5 ¦ (A) \frac12
wrong  B ¦ 2 ¦ 1 ¦ \textbf{(B)} \frac12 ¦ (A) \frac13
gold   \text{(E)}
right  E ¦ (E) ¦ \text{E} ¦ \textbf{(E)}\ 7
wrong  A ¦ e ¦ \text{(D)} ¦ 5
gold   (B) 7
right  B ¦ 7 ¦ (B) ¦ (B) 7 ¦ B. 7 ¦ \textbf{(B)}\ 7
wrong  C ¦ (C) 7 ¦ (B) 8 ¦ 8 ¦ 7B
gold   \mathrm{(D)}\ 3\sqrt{2}
right  D ¦ 3\sqrt2 ¦ \sqrt{18} ¦ (D)
wrong  3 ¦ \mathrm{(D)}\ 3 ¦ 2 ¦ C
gold   \textbf{(E)}\ \text{none of these}
right  E ¦ \text{none of these} ¦ (E)
wrong  D ¦ \text{all of these} ¦ none
gold   i
right  i ¦ \sqrt{-1} ¦ e^{i\pi/2} ¦ \mathrm{i} ¦ -\frac{1}{i}
wrong  -i ¦ 1 ¦ -1 ¦ j ¦ 2i ¦ I
gold   -i
right  \frac1i ¦ i^3 ¦ e^{-i\pi/2} ¦ -\mathrm{i}
wrong  i ¦ -1 ¦ 1
gold   \sqrt{2}
right  |1+i| ¦ 2^{0.5} ¦ 2^{\frac12} ¦ \frac{2}{\sqrt2}
wrong  1+i ¦ 2 ¦ 1.414 ¦ 1.41421356 ¦ \sqrt3 ¦ -\sqrt2
gold   (2+i)(2-i)
right  5
wrong  3 ¦ 4-i ¦ 4 ¦ 2
gold   \frac{3}{5} - \frac{4}{5}i
right  \frac{3-4i}{5} ¦ 0.6 - 0.8i
wrong  \frac35 ¦ \frac{3+4i}{5} ¦ -\frac45 ¦ \frac{3}{5}-\frac{4}{5}
gold   2\text{cis}\frac{\pi}{3}
wrong  2 ¦ \frac{\pi}{3}
gold   200000
right  2×10⁵ ¦ 2e5 ¦ 2 \cdot 10^5 ¦ 200,000 ¦ 200 000
wrong  2 ¦ 10⁵ ¦ 2×10⁴ ¦ 2x10
gold   [0, 1]
right  x ∈ [0, 1] ¦ 0 ≤ x ≤ 1 ¦ [0,1]
wrong  (0,1) ¦ 0 ¦ 1 ¦ [0,1) ¦ x ∈ (0,1] ¦ 0 < x ≤ 1 ¦ \{0,1\} ¦ 0,1 ¦ [1,0]
gold   30^\circ
right  θ = 30° ¦ 30° ¦ 30 ¦ \angle A = 30^\circ ¦ 30 \text{ degrees} ¦ 30^{\circ}
wrong  60° ¦ 3 ¦ 30' ¦ \frac{\pi}{6} ¦ 30\%
gold   7
right  £7 ¦ 7 € ¦ €7 ¦ \$7 ¦ ¥7 ¦ 7元 ¦ 7 m² ¦ 7 cm³ ¦ 7% ¦ 7°
wrong  £8 ¦ 7万 ¦ 7k
gold   \begin{pmatrix} 2 & -1 \\ 0 & 3 \end{pmatrix}
right  \begin{pmatrix}2 & -1\\[4pt] 0 & 3\end{pmatrix} ¦ \begin{bmatrix}2&-1\\0&3\end{bmatrix}
right  \left(\begin{matrix}2&-1\\0&3\end{matrix}\right)
right  \begin{pmatrix}2 & -1\\0 & 3\\\end{pmatrix} ¦ \begin{pmatrix}2 & -1 \cr 0 & 3\end{pmatrix}
wrong  \begin{pmatrix}2 & 1\\0 & 3\end{pmatrix} ¦ \begin{pmatrix}2 & 0\\-1 & 3\end{pmatrix} ¦ 3
wrong  \begin{vmatrix}2 & -1\\0 & 3\end{vmatrix} ¦ 6 ¦ \begin{pmatrix}2 & -1\end{pmatrix}
gold   \begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}
wrong  1 ¦ 4 ¦ \begin{pmatrix}1&2\\3&4\end{pmatrix}
gold   x<2 \text{ or } x>3
right  x \in (-\infty, 2) \cup (3, \infty) ¦ (-\infty ,2) \cup (3 , +\infty)
wrong  (2,3) ¦ 2 ¦ x<3 \text{ or } x>2
gold   1 \le x < 3
right  [1,3) ¦ 1 ≤ x < 3 ¦ 3 > x \ge 1
wrong  1 < x < 3 ¦ [1,3] ¦ 1 ¦ 3 ¦ 1 \le y < 3 ¦ 1 \le x < 4
gold   \frac{200}{3}\%
right  66\frac{2}{3}\% ¦ \frac{2}{3} ¦ \frac{200}{3}
wrong  66\% ¦ 66.7\% ¦ 200\% ¦ 3 ¦ 200
gold   12\frac{1}{2}\%
right  12.5\% ¦ 0.125 ¦ \frac{25}{2}\%
wrong  12\% ¦ \frac12\% ¦ 12
gold   101_2
right  101_{2} ¦ 101_{\text{two}}
wrong  5 ¦ 101 ¦ 101_3 ¦ 110_2
gold   1:2
right  1:2
wrong  1 ¦ 2 ¦ 2:1 ¦ 12 ¦ 1.2
gold   \text{9:30 a.m.}
right  9:30 \text{ a.m.} ¦ 9:30 AM ¦ 9:30 a.m.
wrong  9 ¦ 30 ¦ 9:30 p.m. ¦ 9:35 a.m.
gold   a^2 + b^2 = c^2
right  c^2=a^2+b^2 ¦ a^2 = c^2 - b^2
wrong  c^2 ¦ a^2-b^2=c^2 ¦ a+b=c ¦ 2
gold   -2 < x < 2, x \neq 0
right  -2<x<2, x \ne 0
wrong  -2<x<2 ¦ (-2,2) ¦ 0 ¦ 2
gold   x = \frac{\pi}{4} + k\pi
right  x = k\pi + \frac{\pi}{4} ¦ \frac{\pi}{4}+k\pi
wrong  \frac{\pi}{4} ¦ x = \frac{\pi}{4}+2k\pi ¦ k\pi ¦ 4
gold   6\text{ and }8
right  6, 8 ¦ 8 and 6 ¦ 6 \text{ and } 8
wrong  6 ¦ 8 ¦ 14 ¦ 68 ¦ 6,8,10
gold   \text{(0,1)}
right  (0,1)
wrong  0 ¦ 1 ¦ (1,0) ¦ [0,1]
gold   \sqrt{2} \text{ and } -\sqrt{2}
right  \pm\sqrt2 ¦ -\sqrt2, \sqrt2
wrong  \sqrt2 ¦ 2 ¦ \pm 2
gold   3 + 2\sqrt{2}
right  (1+\sqrt2)^2 ¦ 2\sqrt2+3 ¦ 3+\sqrt8
wrong  3 ¦ 5\sqrt2 ¦ 3-2\sqrt2 ¦ 3+2\sqrt3 ¦ 2+3\sqrt2
gold   \ln 2 + 1
right  1+\ln 2 ¦ \ln(2e)
wrong  \ln 3 ¦ \ln 2 ¦ 1 ¦ \log 2 + 1 ¦ \ln(2)-1
gold   e^{2x}
right  (e^x)^2 ¦ \exp(2x)
wrong  e^2 ¦ e^{x} ¦ 2e^x ¦ e^{2y} ¦ e^{-2x} ¦ e^2x
gold   \frac{1}{1-x}
right  (1-x)^{-1} ¦ -\frac{1}{x-1}
wrong  1 ¦ 1-x ¦ \frac{1}{x-1} ¦ \frac{1}{1+x} ¦ \frac{1}{1}-x ¦ 1/1-x
gold   2\sin\theta\cos\theta
right  \sin 2\theta ¦ 2 \sin(\theta) \cos(\theta)
wrong  \sin\theta ¦ 2 ¦ \cos 2\theta ¦ 2\sin\theta ¦ \sin 2 \cdot \theta
gold   f^{-1}(x) = \frac{x-1}{2}
right  f^{-1}(x) = \frac{1}{2}(x-1)
wrong  2 ¦ f(x) = \frac{x-1}{2} ¦ f^{-1}(x) = \frac{x+1}{2} ¦ 1
gold   O(n^2)
right  O(n^2)
wrong  n ¦ O(n) ¦ 2 ¦ O(n^3)
gold   P(A \cup B)
right  P(A \cup B)
wrong  P(A) ¦ P(A\cap B) ¦ A
gold   \text{The set of all primes}
wrong  2 ¦ \text{The set of all integers}
gold   \pm 1 \pm \sqrt{2}
right  \pm 1 \pm \sqrt{2}
wrong  1+\sqrt2 ¦ 1 ¦ \pm 1 ¦ \pm(1+\sqrt2)
gold   24\text{ cm}, 32\text{ cm}
right  24, 32 ¦ 32 \text{ cm}, 24 \text{ cm}
wrong  24 ¦ 56 ¦ 24\text{ cm}, 32\text{ m}
"""
"""Contents of boxes."""
WRITTEN = r"""
gold   7
right  \boxed {7} ¦ \boxed{5} is the radius, so the area is \boxed{7}. ¦ Answer:7
right  Final Answer:**7** ¦ #### 7 ¦ **Final Answer**: 7 ¦ The answer is 7. ¦ <answer>7</answer>
right  Answer: $7$ ¦ The final answer is: $\boxed{7}$ ¦ **Final Answer**⏎\[⏎\boxed{7}⏎\]
right  so we need 7 ¦ We get 3 + 4 = 7. ¦ \fbox{7} ¦ $$7$$ ¦ x = 7 ¦ **7** ¦ The answer is **7**.
right  ANSWER: 7 ¦ Thus, the answer is $\boxed{7}$, as $3+4=7$. ¦ The total number of ways is 7.
right  \boxed{\boxed{7}} ¦ Answer:⏎7 ¦ Therefore, the answer is:⏎⏎$$\boxed{7}$$
wrong  \boxed{7} is the radius, so the area is \boxed{5}. ¦ \boxed{5} and \boxed{7} ¦ Answer:5
wrong  The answer is 5, not 7. ¦ To find 3 + 4, we need
wrong  To calculate the sum of 3 + 4, we'll need to ¦ 3 + 4 is indeed equal to
wrong  11 is the equivalent of 3 + 4. ¦ 3 + 4 is 8. ¦ Prefix: 3 + 4 does not exist.
wrong  Let me compute 9 - 2 first ¦ the answer is not 7 ¦ It is at least 7 ¦ more than 7 ¦ \boxed{7
wrong  \boxed{} 7 ¦ \boxed{\text{unknown}} but perhaps 7 ¦ \boxed{?} 7 ¦ The answer is 7 or 8.
wrong  The answer is between 7 and 9. ¦ Let $x = 7$, then $y = 8$. ¦ We need $3+4$.
wrong  Compute $3 + 4$ to see it. ¦ It's 14/2 + 1 ¦ 7 million ¦ <answer>8</answer> 7
wrong  \boxed{\frac{7}{}} ¦ \boxed{7\foo} ¦ I think $7 < x$
gold   5
right  The answer is $x = 5$. ¦ Hence $x=5$ ¦ Therefore x = 5. ¦ So there are 5 apples.
right  So the total cost is $5. ¦ It takes him 5 hours. ¦ We conclude that the number is 5
right  Final answer: 5 ¦ Final Answer: $\boxed{5}$ ¦ The answer: 5 ¦ ### Answer: 5
right  ### Final Answer⏎5 ¦ Answer: **5 dollars** ¦ Answer: 5 dollars
right  The answer is 5 dollars per hour. ¦ The answer is \(5\). ¦ \[x = 5\]
right  The correct answer is 5. ¦ The final answer is 5 (since 2+3=5). ¦ the answer is 2+3 = 5
right  So 2 + 3 = 5. ¦ A total of 5. ¦ Total: 5 ¦ Result: 5 ¦ = 5 ¦ She has 10 - 5 = 5 left. ¦ x=5
right  Janet makes $5 every day. ¦ #### 5 ¦ 2+3=5⏎#### 5 ¦ The answer is:⏎⏎5 ¦ Answer⏎⏎5
right  <answer>5</answer> ¦ <answer>The answer is 5.</answer> ¦ <answer>\boxed{5}</answer>
right  <answer> 5 apples </answer> ¦ **Solution:** ... **Answer: 5** ¦ **Final answer: 5.**
right  I get $\frac{10}{2} = 5$. ¦ $$x = \frac{10}{2} = 5$$ ¦ 5. ¦ "5" ¦ (5)
right  The answer is $5$, because $x^2 = 25$. ¦ $\boxed{5}$ cm ¦ x = \boxed{5}
right  $x=\boxed{5}$, which is the answer
wrong  The answer is $x > 5$. ¦ The answer is $5x$. ¦ The answer is x > 5. ¦ The answer is 5 and 6.
wrong  The answer is 5 or 6. ¦ Answer: between 5 and 7 ¦ Answer: 5 or 6 ¦ **Answer:** 5, 6
wrong  It is not 5. ¦ The answer cannot be 5 ¦ So x ≠ 5 ¦ So $x \neq 5$. ¦ Thus $x \ge 5$.
wrong  Thus the answer is $5\sqrt{2}$. ¦ Answer: 5√2 ¦ Answer: 5^2 ¦ Answer: -5 ¦ Answer: 5!
wrong  Answer: 0.5 ¦ Answer: 5/6 ¦ There are 5 or 6 ways. ¦ x = 5 or x = 6
wrong  The solutions are 4 and 5. ¦ The roots are $x=4$ and $x=5$. ¦ Step 5 ¦ Step 5: multiply.
wrong  In part 5, we ¦ Since 2 + 3 is 5, the answer is 6. ¦ 5% of 20 ¦ at most 5
wrong  approximately 5 million ¦ 5 hundred ¦ The ratio is 5:6. ¦ The ratio is 5 : 6
wrong  5 is too small, 6 is right ¦ The interval is [0, 5]. ¦ The point is (0, 5).
wrong  We have $f(5) = 6$. ¦ $2^5$ ¦ $x_5$ ¦ The answer is 5th ¦ The answer is 15 - 10 + 1
wrong  Answer: 5 + ¦ The answer is ... 5? ¦ Let us count: 1 2 3 4 5 ¦ 1, 2, 3, 4, 5
wrong  \boxed{5} or \boxed{6} ¦ \boxed{4}\boxed{5} ¦ \boxed{x^5} ¦ $\boxed{5}$⏎$\boxed{6}$
wrong  \boxed{5}? No, \boxed{6} ¦ <answer>5</answer><answer>6</answer> ¦ <answer>5 or 6</answer>
wrong  <answer>6</answer> 5 ¦ Answer: 5⏎Answer: 6 ¦ The answer is 5. The answer is 6. ¦ log_2 5
wrong  the base-5 number ¦ x^2 = 5 ¦ 5 = x^2 ¦ So $x^2 = 5$. ¦ The equation is $y = x + 5$.
wrong  x + 2 = 5 ¦ 3 mod 5 ¦ minus 5 ¦ negative 5 ¦ five ¦ 5 thousand ¦ 5 and a half ¦ 5 1/2 ¦ 5½
wrong  5 out of 6 ¦ 5 percent of 10 ¦ 5 less than 11 ¦ 5 times 2 ¦ twice 5 ¦ the square root of 5
wrong  5 squared ¦ 5 cubed ¦ 5 factorial ¦ 1.5 ¦ 1,5 ¦ 5,000 ¦ 5e3 ¦ 5 x 10 ¦ $5 \times 10$
wrong  5 \cdot 10 ¦ 5 choose 2 ¦ 5C2 ¦ 5:00 ¦ 12:05 ¦ 5/12/2020 ¦ 5pm ¦ 5 p.m. ¦ from 1 to 5 ¦ 1-5
wrong  1–5 ¦ about 5 ¦ 5+ ¦ 5- ¦ <5 ¦ >5
gold   \frac{1}{2}
right  The probability is 1/2. ¦ The probability is $\frac12$. ¦ So P = 1/2. ¦ 50% ¦ Answer: 0.5
right  The probability is \frac{1}{2}. ¦ There is a 1/2 chance.
wrong  The probability is 1 in 2. ¦ 1 out of 2 ¦ 1:2 ¦ 1 ¦ 2 ¦ The probability is 1/2 + 1/4.
wrong  1/2 of 1/2 ¦ one half
gold   2\sqrt{3}
right  The length is $2\sqrt{3}$. ¦ So the side is 2√3. ¦ The length is $2\sqrt{3}$ units.
right  The answer is $\sqrt{12} = 2\sqrt{3}$. ¦ $AB = \sqrt{12} = 2\sqrt3$
wrong  The answer is $2 + \sqrt{3}$. ¦ It is 2 times $\sqrt3$.
wrong  The answer is 2 times the square root of 3 ¦ 2 and \sqrt{3} ¦ The length is $\sqrt{3}$.
gold   (2, 3)
right  The point is (2, 3). ¦ The point is $(2,3)$. ¦ Answer: (2, 3) ¦ So x = 2, y = 3.
right  $x=2$ and $y=3$ ¦ The solution is $x = 2$, $y = 3$. ¦ \boxed{x=2}, \boxed{y=3}
right  $x=\boxed{2}$ and $y=\boxed{3}$
wrong  The point is (3, 2). ¦ The solutions are 2 and 3. ¦ $x=3$ and $y=2$ ¦ \boxed{2}, \boxed{3}
wrong  $y=\boxed{2}$ and $x=\boxed{3}$
gold   A
right  The answer is A. ¦ Answer: A ¦ **Answer: (A)** ¦ The correct answer is (A).
right  Option A is correct. ¦ The correct option is A. ¦ The answer is $\boxed{\text{A}}$ ¦ A ¦ (A)
right  **A** ¦ A. ¦ The answer is \textbf{(A)}. ¦ The correct choice is **(A)**. ¦ Answer: A) 12
right  the answer is (A) 12 ¦ \boxed{\textbf{(A)}} ¦ The answer is option (A).
wrong  The answer is B. ¦ A or B ¦ Answer: A or B ¦ Option B is correct, not A. ¦ A man is here.
wrong  A is wrong. ¦ Answer: All ¦ AB ¦ a ¦ A+B ¦ I choose B over A ¦ The answer is not A.
wrong  \boxed{A, B} ¦ \boxed{AB}
gold   Yes
right  Yes ¦ The answer is yes. ¦ \boxed{\text{Yes}} ¦ Answer: Yes
wrong  No ¦ Yes and no ¦ The answer is no. ¦ Not yes ¦ Maybe yes
gold   34
right  Answer:34 ¦ Final Answer:**34** ¦ Final Answer: **34** ¦ **Answer**: 34
right  **Final Answer:** 34 ¦ Answer : 34 ¦ answer:34. ¦ **Answer:**34 ¦ Final answer:34 ¦ ANSWER:34
right  The final answer:34 ¦ Answer: $34$. ¦ Answer: \(34\) ¦ Answer: 34.0 ¦ Answer: x = 34
right  Answer:⏎**34** ¦ The answer is: 34 ¦ Answer is 34 ¦ answer = 34
wrong  Answer:35 ¦ Answer:-34 ¦ Answer:34x ¦ Answer:3 ¦ Answer:34/2 ¦ Answer:34, 35
wrong  Final Answer:**35** 34 ¦ Answer:34! ¦ Answer:34^2 ¦ Answer: not 34 ¦ Answer: >34
wrong  Answer: 3 4 ¦ Answer: 34 or 43
gold   12
right  There are 12 students in total. ¦ We have $n = 12$ students. ¦ $\boxed{12}$ students
right  \boxed{12 \text{ students}} ¦ \boxed{12 students} ¦ \boxed{\text{12 students}}
right  So, she needs to buy 12 eggs. ¦ He earned $12. ¦ He earned \$12 in total.
right  The cost is $12$ dollars. ¦ It took 12 minutes. ¦ The total is therefore 12.
right  Therefore, 12 is the answer. ¦ Thus the answer is twelve, 12. ¦ 3 × 4 = 12 ¦ 3 * 4 = 12
right  3 x 4 = 12 ¦ 36/3 = 12 apples ¦ She has 20 - 8 = <<20-8=12>>12 apples.⏎#### 12
right  $3 \cdot 4 = 12$ ¦ \[3 \cdot 4 = 12\] ¦ x = 12 cm ¦ 12! is too big; the answer is 12. ¦ 12.00
right  012 ¦ +12 ¦ $12 ¦ 12% ¦ \boxed{12}\% ¦ \boxed{12}^\circ ¦ Final: \boxed{12} ¦ 答案是12 ¦ 答案：12
right  所以答案为 12。 ¦ La respuesta es 12. ¦ \boxed{n=12} ¦ \boxed{n = 12.} ¦ \boxed{\$12} ¦ \boxed{12,}
wrong  12 more than 5 ¦ There were 12 at first and then 15. ¦ 12 is greater than 11 ¦ So 12 < x
wrong  more than 12 students ¦ 12 + x ¦ x - 12 = 3 ¦ between 10 and 12 ¦ 12th ¦ the 12-th term
wrong  12/5 ¦ 12:5 ¦ 2^{12} ¦ $2^{12}$ ¦ $x^{12}$ ¦ mod 12 ¦ 5 mod 12 ¦ $5 \pmod{12}$ ¦ \boxed{12x}
wrong  \boxed{12 + 1} ¦ \boxed{12 \text{ or } 13} ¦ \boxed{12, 13} ¦ \boxed{>12} ¦ \boxed{12+}
wrong  \boxed{12 \text{ thousand}} ¦ \boxed{12 \text{ hundred}} ¦ \boxed{12k} ¦ \boxed{12\text{k}}
wrong  \boxed{12!} ¦ \boxed{12\text{ choose }3} ¦ \boxed{1 2} ¦ \boxed{1,2} ¦ \boxed{12_{3}}
wrong  \boxed{0.12} ¦ \boxed{-12} ¦ \boxed{(12, 0)} ¦ \boxed{12:00} ¦ \boxed{\frac{12}{7}}
wrong  \boxed{12^\circ 30'} ¦ \boxed{12 \div 5} ¦ \boxed{\text{12 or 13}} ¦ \boxed{\text{about } 13}
wrong  \boxed{\text{more than 12}} ¦ \boxed{\text{12 more}} ¦ \boxed{x \mid 12} ¦ \boxed{12 \mid x}
wrong  \boxed{\gcd(12, 18)} ¦ \boxed{\{12, 18\}} ¦ \boxed{a_{12}} ¦ \boxed{\log 12}
wrong  \boxed{12\cdots} ¦ \boxed{12\ldots} ¦ \boxed{12...} ¦ \boxed{3 \times 5 = 12}
wrong  \boxed{12 = 13} ¦ \boxed{12 \to 13} ¦ \boxed{12e} ¦ \boxed{12\%} of 50 is 6, so \boxed{6}
gold   6
right  \boxed{\gcd(12, 18)} ¦ \boxed{12\%} of 50 is 6, so \boxed{6} ¦ \boxed{3!}
gold   x > 3
right  So $x > 3$. ¦ \boxed{x > 3} ¦ The answer is $x>3$. ¦ Answer: x > 3
wrong  So $x \ge 3$. ¦ 3 ¦ x = 3 ¦ $x > 3$ or $x < 0$ ¦ Answer: x < 3 ¦ Answer: 3
gold   x^2+1
right  The polynomial is $x^2+1$. ¦ Answer: x^2 + 1 ¦ So f(x) = x^2 + 1. ¦ $f(x)=x^2+1$
wrong  The polynomial is $x^2$. ¦ Answer: x^2 ¦ Answer: 1 ¦ Answer: x^2 - 1 ¦ x^2 + 1 = 0
gold   \{1, 2\}
right  The set is $\{1, 2\}$. ¦ Answer: {1, 2} ¦ The solutions are 1 and 2. ¦ x = 1 or x = 2
right  x = 1, 2 ¦ $x = 1$ or $x = 2$ ¦ The roots are $1$ and $2$. ¦ \boxed{1} and \boxed{2}
wrong  The set is $\{1\}$. ¦ 1 ¦ 2 ¦ 12 ¦ x=1, y=2 ¦ Answer: (1, 2)
gold   \frac{\pi}{6}
right  θ = π/6 ¦ The angle is $\frac{\pi}{6}$. ¦ Answer: pi/6 ¦ So the probability is π/6.
wrong  π ¦ 30° ¦ 6 ¦ The angle is $\pi$. ¦ π/6 + 1 ¦ π/3
gold   Monday
right  Monday ¦ The answer is Monday. ¦ Answer: Monday ¦ \boxed{\text{Monday}} ¦ **Monday**
right  <answer>Monday</answer>
wrong  Tuesday ¦ The answer is Tuesday. ¦ Monday or Tuesday ¦ not Monday ¦ Answer: Sunday
gold   see figure
right  \boxed{\text{see figure}} ¦ see figure
wrong  1 ¦ \boxed{figure}
"""
"""Whole answers."""
ASKED = r"""
gold   57
prompt What is 30 + 27?
right  57 ¦ The sum 30 + 27 is 57. ¦ 30 + 27 = 57 ¦ \boxed{57} ¦ \boxed{30+27=57}
wrong  30 + 27 ¦ \boxed{30 + 27} ¦ \boxed{30+27} ¦ $30+27$ ¦ The answer is 30 + 27. ¦ Answer: 30+27
wrong  27 + 30 ¦ \boxed{27+30} ¦ To calculate the sum of 30 + 27 ¦ \boxed{30 + 27 = 30 + 27}
gold   30 + 27
prompt What is 30 + 27 as a sum?
right  \boxed{30+27}
gold   33
prompt Calculate 16 + 17.
right  33 ¦ The answer is 33. ¦ 16 + 17 = 33 ¦ \boxed{33} ¦ The sum is 33. ¦ $16 + 17 = 33$
wrong  16 + 17 is indeed equal to ¦ When the equation 16 + 17 doesn't fit in itself, it
wrong  16 + 17 is 22. ¦ 16 + 17 equals 22. ¦ 16 + 17 = 22 ¦ \boxed{16+17} ¦ \boxed{17+16}
wrong  \boxed{16 + 17 = 16 + 17} ¦ 16+17 ¦ $16+17$ ¦ (16+17) ¦ \boxed{(16 + 17)}
wrong  \boxed{16 + 17 = ?} ¦ \boxed{x = 16+17} ¦ \boxed{1 \cdot (16+17)} ¦ \boxed{16 + 17 + 0}
wrong  \boxed{-(-16-17)} ¦ \boxed{\text{16 + 17}} ¦ \boxed{16 \text{ plus } 17} ¦ Answer: 16 + 17
wrong  <answer>16 + 17</answer> ¦ 33 = 16 + 18
gold   144
prompt Compute $12 \times 12$.
right  $12 \times 12 = 144$
wrong  12 \times 12 ¦ \boxed{12 \cdot 12} ¦ 12*12 ¦ \boxed{12×12}
gold   120
prompt Evaluate $\frac{6!}{3!}$.
wrong  \boxed{6 \cdot 5 \cdot 4} ¦ \boxed{\frac{6!}{3!}} ¦ \boxed{6!/3!} ¦ $\frac{6!}{3!}$
right  120
gold   x^2+2x+1
prompt Expand $(x+1)^2$.
right  \boxed{x^2+2x+1}
gold   \frac{1}{2}
prompt Simplify $\frac{2}{4}$.
right  \boxed{\frac12}
gold   85
prompt What is 5 * 17?
right  85 ¦ \boxed{85} ¦ The product is 85
wrong  5 * 17 ¦ \boxed{5 \cdot 17} ¦ 17*5 ¦ \boxed{5(17)}
"""
"""Whole answers to questions."""


def forms_of(table: str, around: str = "{}") -> list[Form]:
    """Return the forms of a table. around: the text that each answer stands in, with
    `{}` in its place.
    """
    forms = []
    gold = ""
    prompt = ""
    for line in table.strip().splitlines():
        column, _, text = line.partition(" ")
        text = text.strip().replace("⏎", "\n")
        if column == "gold":
            gold = text
            prompt = ""
        elif column == "prompt":
            prompt = text
        else:
            answers = [around.replace("{}", answer.strip()) for answer in text.split(" ¦ ")]
            forms += [Form(answer, gold, column == "right", prompt) for answer in answers]
    return forms


FORMS = [*forms_of(BOXED, r"\boxed{{}}"), *forms_of(WRITTEN), *forms_of(ASKED)]
