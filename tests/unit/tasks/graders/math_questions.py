r"""Answers that the question, or the text around them, makes right or wrong.

The columns are those of math_forms.py. Each rule has answers on both sides: what it
refuses, and what it must let pass.
"""

from tests.unit.tasks.graders.math_forms import forms_of

BOXED = r"""
gold   \sqrt{50}
right  \sqrt{50} \approx 7.07 ¦ x = \sqrt{50} \approx 7.1
wrong  \sqrt{50} \approx 8 ¦ \sqrt{50} \approx 7.00 ¦ 7.07 ¦ \sqrt{50} \approx 7.08
gold   7.07
right  \sqrt{50} \approx 7.07 ¦ x \approx 7.07
wrong  7 \approx 7.07 ¦ \sqrt{51} \approx 7.07 ¦ 7.07 \approx 8
gold   5
right  x \approx 5 ¦ 5
wrong  5 \approx 6 ¦ 6 \approx 5 ¦ 5 \simeq 6 ¦ 5 \approx 6 \approx 7 ¦ \sqrt{26} \approx 5 ¦ 4.9 \approx 5
wrong  x = 5 \approx 6 ¦ \sqrt{25} \approx 6
gold   2, 3
right  2, 3
wrong  2, 3 \approx 4 ¦ 2 \approx 1, 3
gold   C
prompt What is $2+3$? (A) 4 (B) 6 (C) 5 (D) 7
right  C ¦ (C)\ 5 ¦ \textbf{(C)}\ 5
wrong  (C)\ 4 ¦ (B)\ 6 ¦ (C)\ 5 \approx 6 ¦ (A)\ 5
gold   5
prompt What is $2+3$? (A) 4 (B) 6 (C) 5 (D) 7
right  5 ¦ (C)\ 5
wrong  (A)\ 5 ¦ (C)\ 6 ¦ 2+3
gold   C
right  (C)\ 5 ¦ C
wrong  (B)\ 5
gold   x=4
prompt Solve $3x - 5 = 7$.
right  x=4 ¦ 4 ¦ 4=x
wrong  3x-5=7 ¦ 3x=12 ¦ x-4=0 ¦ 7=3x-5 ¦ \frac{x}{4}=1
gold   x=4
right  x=4 ¦ x = \frac{8}{2}
wrong  3x=12 ¦ x-4=0 ¦ 2x-1=7
gold   x > 2
prompt Solve $5x + 1 > 11$.
right  x>2 ¦ (2, \infty) ¦ 2<x
wrong  5x+1>11 ¦ 5x>10 ¦ x-2>0 ¦ 11<5x+1
gold   (-4,2)
right  -4<x<2 ¦ \{x \mid -4<x<2\}
wrong  |x+1|<3 ¦ -3<x+1<3 ¦ x^2+2x-8<0 ¦ \{x \mid |x+1|<3\}
gold   x \neq 3
right  x \neq 3
wrong  x-3 \neq 0 ¦ 2x \neq 6
gold   y = 4 - 2x
prompt Solve $2x + y = 4$ for $y$.
right  y = 4-2x ¦ y = -2x+4 ¦ y = 2(2-x)
wrong  2x+y=4 ¦ y+2x=4
gold   y = 4 - 2x
prompt Find the line through (0,4) and (2,0).
right  2x+y=4 ¦ y = -2x+4 ¦ 2x+y-4=0
wrong  2x+y=5 ¦ y=4+2x
gold   (x-1)(x-4)
prompt Factor $x^2-5x+4$.
right  (x-4)(x-1) ¦ (x-1)(x-4)
wrong  x^2-5x+4 ¦ 4-5x+x^2
gold   \frac{5}{8}
prompt Write 0.625 as a common fraction.
right  \frac58 ¦ 5/8
wrong  0.625
gold   \frac{5}{8}
prompt A tank is 0.625 full. Which part is full?
right  0.625 ¦ \frac58
wrong  0.62
gold   3\sqrt{5}
prompt Simplify $\sqrt{45}$.
right  3\sqrt5 ¦ 3\sqrt{5}
wrong  \sqrt{45}
gold   \frac{\sqrt3}{3}
prompt Rationalize the denominator of $\frac{1}{\sqrt3}$.
right  \frac{\sqrt3}{3}
wrong  \frac{1}{\sqrt3}
gold   81
prompt What is 27 times 3?
right  81 ¦ 27 \cdot 3 = 81
wrong  27 \cdot 3 ¦ 3^4 ¦ 9^2 ¦ 80+1 ¦ \frac{162}{2}
gold   6
prompt Compute $\frac{42}{7}$.
right  6 ¦ 6.0 ¦ \frac{42}{7}=6
wrong  \frac{42}{7} ¦ 42/7 ¦ 42 \div 7 ¦ 2 \cdot 3 ¦ 3!
gold   -1
prompt Compute $\cos 180^\circ$.
right  -1 ¦ \cos 180^\circ = -1
wrong  \cos 180^\circ ¦ \sin 270^\circ ¦ i^2 ¦ \cos \pi
gold   5+i
prompt Compute $(3-2i)(1+i)$.
right  5+i ¦ i+5
wrong  (3-2i)(1+i) ¦ (1+i)(3-2i)
gold   5050
prompt Compute $\sum_{k=1}^{100} k$.
right  5050
wrong  \sum_{k=1}^{100} k ¦ 50 \cdot 101
gold   55
right  \sum_{k=1}^{10} k ¦ 55
wrong  \sum_{k=1}^{n} k
gold   1024
right  2^{10} ¦ 1024 ¦ 4^5
wrong  2^{11}
gold   5
right  |3+4i| ¦ \gcd(10, 15) ¦ 2+3
wrong  |3+5i|
gold   8
prompt How many subsets has a set of three elements?
right  2^3 ¦ 8
wrong  2^4
gold   2^{10}
prompt Which is larger, $2^{10}$ or $10^3$?
right  2^{10} ¦ 1024
wrong  10^3
gold   120
prompt How many minutes does it take?
right  120 ¦ 120 \text{ minutes} ¦ 120 \text{ min}
wrong  120 \text{ hours} ¦ 120 \text{ km} ¦ 120\% ¦ \$120
gold   120
prompt How many pears are there?
right  120 ¦ 120 \text{ pears}
wrong  120\% ¦ 120^\circ ¦ \$120 ¦ 120 \text{ cm}
gold   40
prompt What is the area, in square metres?
right  40 ¦ 40 \text{ m}^2 ¦ 40 \text{ square meters}
wrong  40 \text{ m} ¦ 40 \text{ cm}^2
gold   40
prompt What percent of them are red?
right  40 ¦ 40\%
wrong  0.4
gold   40\%
prompt What percent of them are red?
right  40 ¦ 40\%
wrong  0.4 ¦ 4000\%
gold   0.4
prompt What is the probability?
right  0.4 ¦ 40\% ¦ \frac25
wrong  0.4\% ¦ 40
gold   3
prompt What is the value of $x$?
right  3 ¦ x=3
wrong  3\% ¦ 300\% ¦ y=3
gold   5\%
right  5 ¦ 0.05 ¦ 5\%
wrong  500 ¦ 0.5 ¦ 500\%
gold   500\%
right  500 ¦ 500\%
wrong  5 ¦ 0.05
gold   (2,5)
prompt Find the vertex of the parabola.
right  (2,5) ¦ (x,y) = (2,5)
wrong  2<x<5 ¦ [2,5]
gold   (2,5)
prompt On which interval does $f$ increase?
right  (2,5) ¦ 2<x<5
wrong  (x,y) = (2,5) ¦ [2,5]
gold   (2,5)
prompt For which $x$ does the point $(x,1)$ lie in the strip?
right  2<x<5 ¦ (2,5)
wrong  2 \le x \le 5
gold   5
right  12 \equiv 5 \pmod 7
wrong  12 \equiv 5 \pmod 3 ¦ 5 \equiv 12 \pmod 7
gold   x \equiv 7 \pmod{9}
right  x \equiv 7 \mod 9 ¦ x \equiv 16 \pmod 9
wrong  x \equiv 7 \mod 8 ¦ x \equiv 2 \mod 9
gold   x=1, y=2 \text{ or } x=2, y=1
right  (1,2),(2,1) ¦ (2,1), (1,2) ¦ x=2, y=1 \text{ or } x=1, y=2
wrong  (1,2) ¦ (1,2),(1,2) ¦ (1,1),(2,2) ¦ 1, 2
gold   1
right  \tanh(0)+1 ¦ \cos(0) ¦ \frac{\sqrt2}{\sqrt2} ¦ \sin^2(1)+\cos^2(1)
wrong  \tanh(200) ¦ \cos(10^{-60}) ¦ \frac{\sin\pi}{\sin\pi} ¦ (\sin\pi)^0 ¦ \sqrt{1+10^{-150}} ¦ \frac{|x|}{x}
wrong  1+0^a ¦ \frac{e^{i\pi}+1}{e^{i\pi}+1} ¦ \frac{x}{x} ¦ \frac{\sin(10^{-50})}{10^{-50}} ¦ 7^{10^{-300}}
gold   \sqrt2
right  \sqrt{2} ¦ \frac{2}{\sqrt2} ¦ 2\cos 45^\circ
wrong  \sqrt{2+10^{-150}} ¦ \sqrt{2}+10^{-200} ¦ \sqrt[4]{4+10^{-90}}
gold   x
right  x ¦ (\sqrt[3]{x})^3 ¦ x+0
wrong  |x| ¦ \max(x,-100) ¦ |x+1000|-1000 ¦ \sqrt{(x+10^6)^2}-10^6 ¦ x+\lfloor \frac{x}{10^9} \rfloor
gold   |x|
right  |x| ¦ \sqrt{x^2} ¦ \max(x,-x) ¦ |-x|
wrong  x ¦ -x ¦ |x|+\lfloor |x|/10^9 \rfloor
gold   \sqrt{x}
right  \sqrt x ¦ x^{1/2} ¦ x^{0.5}
wrong  \sqrt{|x|} ¦ x
gold   1.5 \text{ million}
right  1500000 ¦ 1.5 \text{ million}
wrong  1.5 ¦ 1.5 \text{ billion}
"""
WHOLE = r"""
gold   5
right  $x = \boxed{5}$ ¦ $\boxed{5}$ cm ¦ Thus 2 + 3 = \boxed{5}. ¦ (\boxed{5}) ¦ **\boxed{5}** ¦ - \boxed{5}
right  The answer is \boxed{5}! ¦ \[\begin{aligned} x &= 2+3 \\ &= \boxed{5}.\end{aligned}\] ¦ $\mathbf{\boxed{5}}$
right  It is not 4; it is \boxed{5}. ¦ \boxed{5}, which is a prime. ¦ \boxed{5} - that is all ¦ $\text{So } \boxed{5}$
right  The side is \boxed{4}, so the area is \boxed{5}. ¦ Case 1 gives \boxed{4}. Case 2 gives \boxed{5}.
wrong  2\cdot\boxed{5} ¦ $2\cdot\boxed{5}$ ¦ \boxed{5}\sqrt3 ¦ \boxed{5}! ¦ -\boxed{5} ¦ x > \boxed{5} ¦ 1\boxed{5}
wrong  \boxed{5}0 ¦ \boxed{5}.5 ¦ \boxed{5} million ¦ $\boxed{5}$ million ¦ $\frac{\boxed{5}}{2}$ ¦ \boxed{5}^2
wrong  $\sqrt{\boxed{5}}$ ¦ $3+\boxed{5}$ ¦ \boxed{5}/7 ¦ \boxed{5}:30 ¦ $\boxed{5}x$ ¦ $\boxed{5}\pi$
wrong  It is not \boxed{5}. ¦ \boxed{5} is not the answer. ¦ \boxed{5} or 6 ¦ 6 or \boxed{5} ¦ Either \boxed{6} or \boxed{5}
wrong  It may be \boxed{6}, perhaps \boxed{5}. ¦ It might be \boxed{4}, it might be \boxed{5}. ¦ \boxed{6} / \boxed{5}
right  Answer: 5, because 6 is too large. ¦ The answer is 5, which is a prime. ¦ Answer: 5 (since 2+3=5).
right  The answer is 5. This is less than 6. ¦ The answer is 5 if we count correctly.
wrong  Answer: 5 (or 6) ¦ Answer: 5. Or 6. ¦ Answer: 5; alternatively 6 ¦ The answer is 5 if x>0, otherwise 6.
wrong  The answer is 5, then 6. ¦ The answer is 5, but many say 6 ¦ Answer: 5? ¦ The answer is 5 (approximately 6)
right  If we add them, we get 5. ¦ When n = 2, we obtain 5. ¦ Let n be its length. Then n = 5. ¦ So there are 5.
wrong  Is it 5? ¦ Let x = 5 ¦ when x = 5 ¦ Suppose it is 5 ¦ no 5 ¦ anything but 5 ¦ n = 5 is excluded ¦ nowhere near 5
wrong  We divide by 5 ¦ It could be 4 or it could be 5. ¦ It is probably 5 ¦ 1. 2. 3. 4. 5. ¦ If it were 5 ¦ Maybe 5
gold   \sqrt2
right  The answer is $\sqrt2$ (approximately 1.414). ¦ $x = \boxed{\sqrt2} \approx 1.41$ ¦ \boxed{\sqrt2} \approx 1.414
wrong  \boxed{\sqrt2} \approx 1.5 ¦ The answer is $\sqrt2$ (approximately 1.5).
gold   5\%
right  \boxed{5}\% ¦ \boxed{5\%} ¦ $\boxed{5}\%$
wrong  \boxed{5}0\% ¦ 2\cdot\boxed{5}\%
gold   20
prompt Eve has 20 figs. She gets 7 and eats 7. How many has she?
right  So she has 20 figs. ¦ 20 ¦ The answer is 20. ¦ 20 + 7 - 7 = 20 ¦ That makes 20.
wrong  Eve has 20 figs. ¦ First, Eve has 20. ¦ Eve has 20 figs. She gets 7 and eats 7. How many has she?
gold   30
prompt What is $17+13$?
right  30 ¦ 17+13=30 ¦ The sum is 30. ¦ Answer: 30
wrong  Answer: 17+13 ¦ $13+17$ ¦ The sum is $20+10$. ¦ <answer>10+20</answer> ¦ $15 \cdot 2$
gold   E
prompt Which is prime? (A) 1 (B) 4 (C) 6 (D) 9 (E) 5
right  E ¦ \boxed{\text{(E) 5}} ¦ The answer is (E).
wrong  Which is prime? (A) 1 (B) 4 (C) 6 (D) 9 (E) 5 ¦ \boxed{\text{(E) 9}} ¦ \boxed{D}
"""
QUESTIONS = [*forms_of(BOXED, r"\boxed{{}}"), *forms_of(WHOLE)]
