// What the words and marks of a language are. A language is a table of modes; a mode is a list of rules, tried in turn at each place of
// a line: [pattern, kind of the token, next mode]. A mode lasts beyond the end of its line unless it names the one that follows there.

const words = (text) => new Set(text.trim().split(/\s+/));

const NUMBER = /\b(?:0[xX][\da-fA-F_]+|0[bB][01_]+|0[oO][0-7_]+|\d[\d_]*(?:\.[\d_]+)?(?:[eE][+-]?\d+)?)\w*/;
const WORD = /[\p{L}_$][\p{L}\p{N}_$]*/u;
const DOUBLE = /"(?:[^"\\]|\\.)*"?/;
const SINGLE = /'(?:[^'\\]|\\.)*'?/;

/** Rules for words: those of the language, else names of types, of functions, or nothing. */
function word(keywords, builtins = new Set(), ignoresCase = false) {
  return (text, next) => {
    const name = ignoresCase ? text.toLowerCase() : text;
    if (keywords.has(name)) return "keyword";
    if (builtins.has(name)) return "builtin";
    if (next === "(") return "function";
    return /^\p{Lu}\p{L}*\p{Ll}/u.test(text) && !ignoresCase ? "type" : "";
  };
}

/** A mode that lasts until `end`. */
const until = (end, kind, inner = /\\./) => [[end, kind, "main"], [inner, kind], [/[^]/, kind]];

/** A language in the manner of C. `more` are rules before all others, `modes` further modes. */
function braces({ keywords, builtins, comment = /\/\/.*/, strings = [DOUBLE, SINGLE], more = [], modes = {}, ignoresCase = false }) {
  return {
    main: [
      ...more,
      ...(comment ? [[comment, "comment"]] : []),
      [/\/\*/, "comment", "block"],
      ...strings.map((pattern) => [pattern, "string"]),
      [NUMBER, "number"],
      [WORD, word(words(keywords), words(builtins ?? "_"), ignoresCase)],
    ],
    block: until(/\*\//, "comment"),
    ...modes,
  };
}

const python = {
  main: [
    [/#.*/, "comment"],
    [/\b[rbfuRBFU]{0,2}"""/, "string", "triple"],
    [/"""/, "string", "triple"],
    [/\b[rbfuRBFU]{0,2}'''/, "string", "single"],
    [/'''/, "string", "single"],
    [/\b[rbfuRBFU]{1,2}"(?:[^"\\]|\\.)*"?/, "string"],
    [/\b[rbfuRBFU]{1,2}'(?:[^'\\]|\\.)*'?/, "string"],
    [DOUBLE, "string"],
    [SINGLE, "string"],
    [/@[\w.]+/, "meta"],
    [NUMBER, "number"],
    [WORD, word(
      words(`and as assert async await break case class continue def del elif else except finally for from global if import in is lambda
        match nonlocal not or pass raise return try while with yield type`),
      words(`True False None self cls abs all any bool bytes callable dict enumerate filter float frozenset getattr hasattr int isinstance
        iter len list map max min next object open print range repr reversed round set setattr sorted str sum super tuple type zip`))],
  ],
  triple: until(/"""/, "string"),
  single: until(/'''/, "string"),
};

const SCRIPT = `as async await break case catch class const continue debugger default delete do else export extends finally for from
  function get if import in instanceof let new of return set static super switch this throw try typeof var void while with yield`;
const SCRIPT_NAMES = "true false null undefined NaN Infinity console window document globalThis Math JSON Object Array Promise Map Set";
const template = [[/`/, "string", "main"], [/\\./, "string"], [/\$\{[^}`]*\}/, "meta"], [/[^]/, "string"]];
const script = (more) => braces({ keywords: SCRIPT + more, builtins: SCRIPT_NAMES, more: [[/`/, "string", "template"]], modes: { template } });
const javascript = script("");
const typescript = script(` abstract any boolean declare enum implements interface is keyof module namespace never number override private
  protected public readonly satisfies string symbol type unknown`);

const json = {
  main: [
    [/"(?:[^"\\]|\\.)*"(?=\s*:)/, "attribute"],
    [DOUBLE, "string"],
    [/\/\/.*/, "comment"],
    [/-?\d[\d.]*(?:[eE][+-]?\d+)?/, "number"],
    [/\b(?:true|false|null)\b/, "keyword"],
  ],
};

const bash = {
  main: [
    [/(?:^|(?<=\s))#.*/, "comment"],
    [/"/, "string", "quoted"],
    [/'/, "string", "plain"],
    [/\$\{[^}]*\}|\$\w+|\$[#?@*!$-]/, "meta"],
    [/(?:^|(?<=\s))--?[\w-]+/, "attribute"],
    [/[\w.\/-]+/, word(
      words("if then else elif fi for while until do done case esac in function select return exit break continue local export declare readonly set unset shift trap"),
      words(`cd echo printf read source test eval exec sudo apt apt-get brew pip pip3 npm npx yarn git docker curl wget make cmake python python3
        node cargo go ls cat grep sed awk find xargs mkdir rm cp mv chmod chown tar ssh scp kill ps head tail sort uniq wc tee touch ln`))],
    [/\b\d+\b/, "number"],
  ],
  quoted: [[/"/, "string", "main"], [/\\./, "string"], [/\$\{[^}]*\}|\$\w+/, "meta"], [/[^]/, "string"]],
  plain: [[/'/, "string", "main"], [/[^]/, "string"]],
};

const html = {
  main: [[/<!--/, "comment", "comment"], [/<[!?][^>]*>?/, "meta"], [/<\/?[\w:.-]+/, "tag", "tag"], [/&#?\w+;/, "number"]],
  comment: until(/-->/, "comment"),
  tag: [[/\/?>/, "tag", "main"], [/[\w:@.#-]+(?=\s*=)/, "attribute"], [/"/, "string", "double"], [/'/, "string", "single"], [/[\w:@.-]+/, "attribute"]],
  double: [[/"/, "string", "tag"], [/[^"]/, "string"]],
  single: [[/'/, "string", "tag"], [/[^']/, "string"]],
};

const css = {
  main: [
    [/\/\*/, "comment", "block"],
    [/\/\/.*/, "comment"],
    [DOUBLE, "string"],
    [SINGLE, "string"],
    [/@[\w-]+/, "keyword"],
    [/--[\w-]+/, "meta"],
    [/#[\da-fA-F]{3,8}\b/, "number"],
    [/[.#][\w-]+/, "type"],
    [/::?[\w-]+(?=[\s{,(.:])/, "builtin"],
    [/[\w-]+(?=\s*:[^:])/, "attribute"],
    [/-?\d[\d.]*(?:%|[a-z]+)?/, "number"],
    [/!important\b/, "keyword"],
    [/[a-zA-Z][\w-]*(?=\()/, "function"],
  ],
  block: until(/\*\//, "comment"),
};

const C = `alignas alignof auto break case catch class concept const consteval constexpr constinit continue co_await co_return co_yield decltype
  default delete do else enum explicit export extern final for friend goto if inline mutable namespace new noexcept operator override private
  protected public register requires restrict return sizeof static static_assert static_cast struct switch template this thread_local throw try
  typedef typename union using virtual volatile while`;
const C_TYPES = `bool char double float int long short signed unsigned void size_t ssize_t int8_t int16_t int32_t int64_t uint8_t uint16_t
  uint32_t uint64_t ptrdiff_t wchar_t true false nullptr NULL std string vector map set`;
const c = braces({ keywords: C, builtins: C_TYPES, more: [[/^\s*#\s*\w+/, "meta"], [/(?<=^\s*#\s*include\s*)<[^>]*>/, "string"]] });

const rust = braces({
  keywords: `as async await break const continue crate dyn else enum extern fn for if impl in let loop match mod move mut pub ref return self Self
    static struct super trait type unsafe use where while`,
  builtins: `true false bool char str String Vec Option Some None Result Ok Err Box i8 i16 i32 i64 i128 isize u8 u16 u32 u64 u128 usize f32 f64`,
  strings: [DOUBLE, /'(?:[^'\\]|\\.[^']*)'/],
  more: [[/#!?\[[^\]]*\]?/, "meta"], [/'[a-z_]\w*\b(?!')/, "meta"], [/\b[a-z_]\w*!(?=[\s({[])/, "function"]],
});

const go = braces({
  keywords: `break case chan const continue default defer else fallthrough for func go goto if import interface map package range return
    select struct switch type var`,
  builtins: `true false nil iota any bool byte complex64 complex128 error float32 float64 int int8 int16 int32 int64 rune string uint uint8 uint16
    uint32 uint64 uintptr append cap close copy delete len make new panic print println recover`,
  more: [[/`/, "string", "raw"]],
  modes: { raw: [[/`/, "string", "main"], [/[^]/, "string"]] },
});

const java = braces({
  keywords: `abstract assert break case catch class const continue default do else enum extends final finally for fun if implements import in
    instanceof interface is native new object override package private protected public record return sealed static super switch synchronized this
    throw throws transient try val var volatile when while yield async await namespace using get set let func guard extension struct protocol init`,
  builtins: "true false null nil boolean bool byte char double float int long short void string String Integer Object List Map",
  more: [[/@\w+/, "meta"]],
});

const sql = {
  ...braces({
    keywords: `add all alter and any as asc begin between by cascade case cast check column commit constraint create cross database default delete desc
      distinct drop else end except exists explain false fetch filter first for foreign from full function grant group having if ilike in index inner
      insert intersect into is join key last lateral left like limit materialized natural not null nulls offset on or order outer over partition
      primary recursive references replace returning revoke right rollback row rows select set table temporary then transaction trigger true
      truncate union unique update using values view when where window with`,
    builtins: `bigint bool boolean bytea char date datetime decimal double float int integer interval json jsonb numeric real serial smallint text
      time timestamp timestamptz uuid varchar`,
    comment: /--.*/, ignoresCase: true,
  }),
};

const yaml = {
  main: [
    [/(?:^|(?<=\s))#.*/, "comment"],
    [/^---.*|^\.\.\.\s*$/, "meta"],
    [/(?<=^\s*(?:- +)*)(?:[\w.\/-]+|"[^"]*"|'[^']*')(?=\s*:(?:\s|$))/, "attribute"],
    [DOUBLE, "string"],
    [SINGLE, "string"],
    [/(?<=[\s[{,])[&*!][\w!.\/-]+/, "meta"],
    [/\b(?:true|false|null|yes|no|on|off)\b/, "keyword"],
    [/(?<=[\s[,:-])-?\d[\d._]*(?=[\s,\]}]|$)/, "number"],
  ],
};
const toml = {
  main: [
    [/#.*/, "comment"],
    [/^\s*\[\[?[^\]]*\]?\]?/, "type"],
    [/[\w.-]+(?=\s*=)/, "attribute"],
    [DOUBLE, "string"],
    [SINGLE, "string"],
    [/\b(?:true|false)\b/, "keyword"],
    [NUMBER, "number"],
  ],
};

const diff = {
  main: [[/^(?:diff|index|---|\+\+\+).*/, "meta"], [/^@@.*/, "function"], [/^\+.*/, "inserted"], [/^-.*/, "deleted"]],
};

const markdown = {
  main: [[/^#{1,6} .*/, "keyword"], [/`[^`]+`/, "string"], [/\*\*[^*]+\*\*/, "type"], [/^\s*(?:[-*+]|\d+\.)(?=\s)/, "meta"], [/\]\([^)]*\)/, "string"]],
};

/** Languages by the names that fences give them. */
export const LANGUAGES = new Map(
  [
    [python, "python py python3 pyi pycon"],
    [javascript, "javascript js jsx mjs cjs node"],
    [typescript, "typescript ts tsx"],
    [json, "json jsonc json5 jsonl ndjson"],
    [bash, "bash sh shell zsh console shell-session dockerfile makefile"],
    [html, "html xml svg xhtml vue svelte"],
    [css, "css scss less"],
    [c, "c h cpp c++ cc cxx hpp cuda objc arduino"],
    [rust, "rust rs"],
    [go, "go golang"],
    [java, "java kotlin kt swift csharp c# cs scala dart"],
    [sql, "sql postgresql postgres mysql sqlite"],
    [yaml, "yaml yml"],
    [toml, "toml ini cfg"],
    [diff, "diff patch"],
    [markdown, "markdown md"],
  ].flatMap(([language, names]) => names.split(" ").map((name) => [name, language])),
);
