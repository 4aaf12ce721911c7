// TeX's names of characters, and which of them behave in a way of their own.

/** Pairs of names and characters from a text of both. */
function table(text) {
  const words = text.trim().split(/\s+/);
  return new Map(Array.from({ length: words.length / 2 }, (_, at) => [words[2 * at], words[2 * at + 1]]));
}

/** Letters that are set in italics. */
export const LETTERS = table(`
  alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ varkappa ϰ
  lambda λ mu μ nu ν xi ξ omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ
  chi χ psi ψ omega ω ell ℓ imath ı jmath ȷ partial ∂`);

/** Letters that stand upright. */
export const UPRIGHT = table(`
  Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω hbar ℏ hslash ℏ Re ℜ Im ℑ wp ℘
  aleph ℵ beth ℶ infty ∞ emptyset ∅ varnothing ∅ nabla ∇ forall ∀ exists ∃ nexists ∄ top ⊤ bot ⊥ angle ∠ degree °
  triangle △ square □ Box □ blacksquare ■ qed ∎ checkmark ✓ dagger † ddagger ‡ S § P ¶ copyright © pounds £ euro €
  ldots … dots … cdots ⋯ dotsc … dotsb ⋯ dotsm ⋯ dotsi ⋯ vdots ⋮ ddots ⋱ hearts ♡ heartsuit ♡ spadesuit ♠ clubsuit ♣
  diamondsuit ♢ star ⋆ bigstar ★ flat ♭ natural ♮ sharp ♯ complement ∁ eth ð mho ℧ prime ′ backprime ‵`);

/** Relations, arrows and operators. */
export const OPERATORS = table(`
  times × cdot ⋅ div ÷ pm ± mp ∓ ast ∗ circ ∘ bullet ∙ oplus ⊕ ominus ⊖ otimes ⊗ oslash ⊘ odot ⊙ wedge ∧ land ∧ vee ∨
  lor ∨ cap ∩ cup ∪ sqcap ⊓ sqcup ⊔ uplus ⊎ setminus ∖ smallsetminus ∖ neg ¬ lnot ¬ amalg ⨿ wr ≀ diamond ⋄
  eq = lt < gt > le ≤ leq ≤ leqslant ⩽ ge ≥ geq ≥ geqslant ⩾ ne ≠ neq ≠ equiv ≡ approx ≈ approxeq ≊ sim ∼ simeq ≃ cong ≅
  propto ∝ ll ≪ gg ≫ prec ≺ succ ≻ preceq ⪯ succeq ⪰ in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ subsetneq ⊊ supset ⊃
  supseteq ⊇ supsetneq ⊋ nsubseteq ⊈ perp ⊥ parallel ∥ nparallel ∦ mid ∣ nmid ∤ asymp ≍ doteq ≐ models ⊨ vdash ⊢ dashv ⊣
  vDash ⊨ lesssim ≲ gtrsim ≳ triangleq ≜ coloneqq ≔ because ∵ therefore ∴ ltimes ⋉ rtimes ⋊ bowtie ⋈ lhd ⊲ rhd ⊳
  to → rightarrow → leftarrow ← gets ← leftrightarrow ↔ Rightarrow ⇒ implies ⟹ Leftarrow ⇐ impliedby ⟸ iff ⟺
  Leftrightarrow ⇔ longrightarrow ⟶ longleftarrow ⟵ Longrightarrow ⟹ Longleftarrow ⟸ Longleftrightarrow ⟺
  longleftrightarrow ⟷ mapsto ↦ longmapsto ⟼ hookrightarrow ↪ hookleftarrow ↩ uparrow ↑ downarrow ↓ updownarrow ↕
  Uparrow ⇑ Downarrow ⇓ nearrow ↗ searrow ↘ swarrow ↙ nwarrow ↖ rightharpoonup ⇀ leftharpoonup ↼ rightleftharpoons ⇌
  leadsto ⇝ rightsquigarrow ⇝ twoheadrightarrow ↠ upharpoonright ↾ colon : surd √`);

/** Operators that grow in displays; those in LIMITS have their limits above and below there. */
export const LARGE = table(`
  sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigvee ⋁ bigwedge ⋀ bigoplus ⨁ bigotimes ⨂ bigodot ⨀ biguplus ⨄ bigsqcup ⨆
  int ∫ iint ∬ iiint ∭ oint ∮ oiint ∯ intop ∫`);
export const INTEGRALS = new Set(["int", "iint", "iiint", "oint", "oiint"]);

/** Names of functions; of LIMITS the subscripts stand below in displays. */
export const FUNCTIONS = new Set(
  `sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan arccot log ln lg exp deg arg dim hom ker
  sgn erf tr rank`.trim().split(/\s+/));
export const LIMITS = new Map(
  "lim max min sup inf det gcd lcm Pr argmax argmin".split(" ").map((name) => [name, name]).concat([
    ["limsup", "lim sup"], ["liminf", "lim inf"], ["injlim", "inj lim"], ["projlim", "proj lim"],
  ]));

export const DELIMITERS = table(`
  langle ⟨ rangle ⟩ lceil ⌈ rceil ⌉ lfloor ⌊ rfloor ⌋ lbrace { rbrace } lbrack [ rbrack ] vert | lvert | rvert | Vert ‖
  lVert ‖ rVert ‖ | ‖ { { } } backslash \\ lgroup ⟮ rgroup ⟯ ulcorner ⌜ urcorner ⌝ uparrow ↑ downarrow ↓ updownarrow ↕`);

/** Marks above, or below where the last column says so: character and whether it stretches. */
export const ACCENTS = new Map(Object.entries({
  hat: ["^"], widehat: ["^", true], tilde: ["~"], widetilde: ["~", true], bar: ["¯"], overline: ["¯", true],
  vec: ["→"], overrightarrow: ["→", true], overleftarrow: ["←", true], overleftrightarrow: ["↔", true], dot: ["˙"], ddot: ["¨"], dddot: ["⃛"], acute: ["´"],
  grave: ["`"], check: ["ˇ"], breve: ["˘"], mathring: ["˚"], overbrace: ["⏞", true], overbracket: ["⎴", true],
}));
export const UNDER = new Map(Object.entries({
  underline: ["_", true], underbrace: ["⏟", true], underbracket: ["⎵", true], underrightarrow: ["→", true], underleftarrow: ["←", true],
}));

/** Widths in em. */
export const SPACES = new Map(Object.entries({
  ",": 0.167, thinspace: 0.167, ":": 0.222, ">": 0.222, medspace: 0.222, ";": 0.278, thickspace: 0.278, "!": -0.167, negthinspace: -0.167,
  " ": 0.25, "\n": 0.25, enspace: 0.5, quad: 1, qquad: 2, enskip: 0.5,
}));

/** Sizes of delimiters in em. */
export const SIZES = new Map(["big", "Big", "bigg", "Bigg"].flatMap((name, at) =>
  ["", "l", "r", "m"].map((side) => [name + side, 1.2 + 0.6 * at])));

/** Environments: the delimiters around them, and how their columns are aligned ("" centres). */
export const ENVIRONMENTS = new Map(Object.entries({
  matrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"],
  smallmatrix: ["", ""], cases: ["{", "", "l"], dcases: ["{", "", "l"], rcases: ["", "}", "l"], array: ["", ""], subarray: ["", ""],
  aligned: ["", "", "rl"], alignedat: ["", "", "rl"], align: ["", "", "rl"], alignat: ["", "", "rl"], flalign: ["", "", "rl"], eqnarray: ["", "", "rcl"],
  split: ["", "", "rl"], gather: ["", ""], gathered: ["", ""], equation: ["", ""], multline: ["", ""], displaymath: ["", ""], math: ["", ""],
}));

// Where the letters and digits of an alphabet begin among the mathematical characters, and which are elsewhere
const ALPHABETS = {
  bold: [0x1d400, 0x1d41a, 0x1d7ce], italic: [0x1d434, 0x1d44e], bolditalic: [0x1d468, 0x1d482, 0x1d7ce], script: [0x1d49c, 0x1d4b6],
  fraktur: [0x1d504, 0x1d51e], double: [0x1d538, 0x1d552, 0x1d7d8], sans: [0x1d5a0, 0x1d5ba, 0x1d7e2], mono: [0x1d670, 0x1d68a, 0x1d7f6],
};
const ELSEWHERE = {
  script: table("B ℬ E ℰ F ℱ H ℋ I ℐ L ℒ M ℳ R ℛ e ℯ g ℊ o ℴ"), fraktur: table("C ℭ H ℌ I ℑ R ℜ Z ℨ"),
  double: table("C ℂ H ℍ N ℕ P ℙ Q ℚ R ℝ Z ℤ"), italic: table("h ℎ"),
};
const GREEK = { bold: [0x1d6a8, 0x1d6c2], bolditalic: [0x1d71c, 0x1d736] };

/** Commands that change the alphabet of their argument. */
export const STYLES = new Map(Object.entries({
  mathbf: "bold", textbf: "bold", boldsymbol: "bolditalic", bm: "bolditalic", pmb: "bolditalic", mathbb: "double", Bbb: "double", mathcal: "script", mathscr: "script",
  mathfrak: "fraktur", mathsf: "sans", mathtt: "mono", mathit: "italic", mathnormal: "italic", mathrm: "normal", mathup: "normal",
}));

/** A character in an alphabet; itself where the alphabet has none. */
export function styled(char, style) {
  const elsewhere = ELSEWHERE[style]?.get(char);
  if (elsewhere) return elsewhere;
  const [capital, small, digit] = ALPHABETS[style] ?? [];
  const code = char.codePointAt(0);
  if (/[A-Z]/.test(char) && capital) return String.fromCodePoint(capital + code - 65);
  if (/[a-z]/.test(char) && small) return String.fromCodePoint(small + code - 97);
  if (/[0-9]/.test(char) && digit) return String.fromCodePoint(digit + code - 48);
  const [greekCapital, greekSmall] = GREEK[style] ?? [];
  if (/[Α-Ω]/.test(char) && greekCapital) return String.fromCodePoint(greekCapital + code - 0x391);
  if (/[α-ω]/.test(char) && greekSmall) return String.fromCodePoint(greekSmall + code - 0x3b1);
  return char;
}
