//! The shader preprocessor: WGSL files with imports, conditions, numbers and unrolling. No generator beside it.
//!
//! Lines whose first character is `#` are directives:
//!
//! ```text
//! #import name            the text of shaders/shared/name.wgsl, once per kernel
//! #ifdef NAME             also #ifndef; then #else, #endif
//! #if R > 1 && SG == 8    integer expressions over defines and loop variables
//! #for r in 0..R          repeats its lines with r bound; may be nested
//! #end                    ends #for
//! #let U = R * 2          a name for a number, to the end of the block it stands in
//! ```
//!
//! In all other lines `${expression}` is replaced by its value, also within names: `acc${r}_${c}`, `x[${r * 4 + 1}u]`.
//! Guarantees: errors name file and line, also those that naga finds in the stitched text ([`Stitched::origin`]).
//! Output is bounded ([`MAX_LINES`]). Not attempted: macros with arguments, strings, floating point.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::expr::evaluate;
use super::sources;

/// No kernel is longer than this after unrolling.
pub const MAX_LINES: usize = 100_000;

/// Numbers and flags that a kernel is compiled with. A flag is the number 1.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Defines(BTreeMap<String, i64>);

impl Defines {
    pub fn new() -> Defines {
        Defines::default()
    }

    pub fn set(mut self, name: &str, value: i64) -> Defines {
        self.0.insert(name.into(), value);
        self
    }

    pub fn flag(self, name: &str) -> Defines {
        self.set(name, 1)
    }

    pub fn get(&self, name: &str) -> Option<i64> {
        self.0.get(name).copied()
    }

    /// Reads what [`fmt::Display`] writes: `R=8 SUBGROUP`.
    pub fn parse(text: &str) -> Option<Defines> {
        let mut defines = Defines::new();
        for word in text.split_whitespace() {
            defines = match word.split_once('=') {
                Some((name, value)) => defines.set(name, value.parse().ok()?),
                None => defines.flag(word),
            };
        }
        Some(defines)
    }
}

impl fmt::Display for Defines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (name, value)) in self.0.iter().enumerate() {
            let space = if i == 0 { "" } else { " " };
            match value {
                1 => write!(f, "{space}{name}")?,
                _ => write!(f, "{space}{name}={value}")?,
            }
        }
        Ok(())
    }
}

/// A fault in a shader file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("shaders/{file}:{line}: {message}")]
pub struct ShaderError {
    /// `kernels/matmul.wgsl`
    pub file: String,
    pub line: u32,
    pub message: String,
}

/// A kernel's whole text and where each line came from.
#[derive(Clone, Debug)]
pub struct Stitched {
    pub name: String,
    pub text: String,
    files: Vec<String>,
    lines: Vec<(u32, u32)>, // (file, line) of each line of `text`
}

impl Stitched {
    /// File and line that line `line` (from 1) of the text came from.
    pub fn origin(&self, line: u32) -> (&str, u32) {
        let idx = (line.max(1) as usize - 1).min(self.lines.len().saturating_sub(1));
        match self.lines.get(idx) {
            Some(&(file, line)) => (&self.files[file as usize], line),
            None => ("", 0),
        }
    }

    /// Parses with naga; an error points into the original file.
    pub fn parse(&self) -> Result<naga::Module, ShaderError> {
        naga::front::wgsl::parse_str(&self.text).map_err(|e| {
            let line = e.location(&self.text).map_or(1, |l| l.line_number);
            let detail: Vec<&str> = e.labels().map(|(_, label)| label).filter(|l| !l.is_empty()).collect();
            self.error_at(line, format!("{} {}", e.message(), detail.join("; ")).trim_end().to_string())
        })
    }

    /// An error at a line of the stitched text.
    pub fn error_at(&self, line: u32, message: String) -> ShaderError {
        let (file, line) = self.origin(line);
        ShaderError { file: file.to_string(), line, message }
    }
}

/// Stitches the embedded kernel of this name.
pub fn stitch(name: &str, defines: &Defines) -> Result<Stitched, ShaderError> {
    let source = sources::kernel(name).ok_or_else(|| ShaderError {
        file: format!("kernels/{name}.wgsl"),
        line: 0,
        message: "no kernel of this name".into(),
    })?;
    stitch_text(name, source.text, defines, &|shared| sources::shared(shared).map(|s| s.text))
}

/// Stitches `text`, with imports looked up by `shared`.
pub fn stitch_text(
    name: &str,
    text: &str,
    defines: &Defines,
    shared: &dyn Fn(&str) -> Option<&'static str>,
) -> Result<Stitched, ShaderError> {
    let mut out = Stitcher {
        defines,
        shared,
        imported: BTreeSet::new(),
        scope: Vec::new(),
        result: Stitched { name: name.into(), text: String::new(), files: Vec::new(), lines: Vec::new() },
    };
    out.file(format!("kernels/{name}.wgsl"), text)?;
    Ok(out.result)
}

/// A file as a tree, so that loops can be walked several times.
enum Node<'a> {
    Text { line: u32, text: &'a str },
    Import { line: u32, name: &'a str },
    If { line: u32, condition: Condition<'a>, then: Vec<Node<'a>>, otherwise: Vec<Node<'a>> },
    Let { line: u32, name: &'a str, value: &'a str },
    For { line: u32, variable: &'a str, from: &'a str, to: &'a str, body: Vec<Node<'a>> },
}

enum Condition<'a> {
    Defined(&'a str),
    NotDefined(&'a str),
    Expression(&'a str),
}

/// What ended a block of lines.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Closer {
    Else,
    Endif,
    End,
    EndOfFile,
}

struct Parser<'a> {
    lines: std::iter::Enumerate<std::str::Lines<'a>>,
}

impl<'a> Parser<'a> {
    /// Reads nodes up to a closing directive; gives that and its line.
    fn block(&mut self) -> Result<(Vec<Node<'a>>, Closer, u32), (u32, String)> {
        let mut nodes = Vec::new();
        let mut last = 1;
        while let Some((idx, text)) = self.lines.next() {
            let line = idx as u32 + 1;
            last = line;
            let Some(directive) = text.trim_start().strip_prefix('#') else {
                nodes.push(Node::Text { line, text });
                continue;
            };
            let (word, rest) = directive.trim().split_once(char::is_whitespace).unwrap_or((directive.trim(), ""));
            let rest = rest.split("//").next().unwrap_or("").trim();
            match word {
                "import" => nodes.push(Node::Import { line, name: rest }),
                "ifdef" => nodes.push(self.condition(line, Condition::Defined(rest))?),
                "ifndef" => nodes.push(self.condition(line, Condition::NotDefined(rest))?),
                "if" => nodes.push(self.condition(line, Condition::Expression(rest))?),
                "for" => nodes.push(self.repeat(line, rest)?),
                "let" => {
                    let (name, value) =
                        rest.split_once('=').ok_or((line, "expected `#let name = value`".to_string()))?;
                    nodes.push(Node::Let { line, name: name.trim(), value });
                }
                "else" => return Ok((nodes, Closer::Else, line)),
                "endif" => return Ok((nodes, Closer::Endif, line)),
                "end" => return Ok((nodes, Closer::End, line)),
                _ => return Err((line, format!("unknown directive #{word}"))),
            }
        }
        Ok((nodes, Closer::EndOfFile, last))
    }

    fn condition(&mut self, line: u32, condition: Condition<'a>) -> Result<Node<'a>, (u32, String)> {
        let (then, closer, _) = self.block()?;
        let (otherwise, closer) = match closer {
            Closer::Else => self.block().map(|(nodes, closer, _)| (nodes, closer))?,
            other => (Vec::new(), other),
        };
        match closer {
            Closer::Endif => Ok(Node::If { line, condition, then, otherwise }),
            _ => Err((line, "this condition has no #endif".into())),
        }
    }

    fn repeat(&mut self, line: u32, rest: &'a str) -> Result<Node<'a>, (u32, String)> {
        let (body, closer, _) = self.block()?;
        if closer != Closer::End {
            return Err((line, "this #for has no #end".into()));
        }
        let header = rest.split_once(" in ").and_then(|(v, range)| Some((v.trim(), range.split_once("..")?)));
        let Some((variable, (from, to))) = header else {
            return Err((line, "expected `#for name in from..to`".into()));
        };
        Ok(Node::For { line, variable, from, to, body })
    }
}

struct Stitcher<'d> {
    defines: &'d Defines,
    shared: &'d dyn Fn(&str) -> Option<&'static str>,
    imported: BTreeSet<String>,
    scope: Vec<(String, i64)>,
    result: Stitched,
}

impl Stitcher<'_> {
    fn file(&mut self, file: String, text: &str) -> Result<(), ShaderError> {
        let file_idx = self.result.files.len() as u32;
        self.result.files.push(file);
        let mut parser = Parser { lines: text.lines().enumerate() };
        let (nodes, closer, line) = parser.block().map_err(|(line, message)| self.error(file_idx, line, message))?;
        if closer != Closer::EndOfFile {
            return Err(self.error(file_idx, line, "nothing is open here that this could close".into()));
        }
        self.emit(file_idx, &nodes)
    }

    /// Emits a block; names bound in it end with it.
    fn emit(&mut self, file: u32, nodes: &[Node<'_>]) -> Result<(), ShaderError> {
        let depth = self.scope.len();
        let done = nodes.iter().try_for_each(|node| self.emit_node(file, node));
        self.scope.truncate(depth);
        done
    }

    fn emit_node(&mut self, file: u32, node: &Node<'_>) -> Result<(), ShaderError> {
        match node {
            Node::Text { line, text } => self.line(file, *line, text)?,
            Node::Import { line, name } => self.import(file, *line, name)?,
            Node::If { line, condition, then, otherwise } => {
                let taken = self.holds(condition).map_err(|m| self.error(file, *line, m))?;
                self.emit(file, if taken { then } else { otherwise })?;
            }
            Node::Let { line, name, value } => {
                let value = self.value(value).map_err(|m| self.error(file, *line, m))?;
                self.scope.push((name.to_string(), value));
            }
            Node::For { line, variable, from, to, body } => {
                let from = self.value(from).map_err(|m| self.error(file, *line, m))?;
                let to = self.value(to).map_err(|m| self.error(file, *line, m))?;
                for value in from..to {
                    self.scope.push((variable.to_string(), value));
                    let done = self.emit(file, body);
                    self.scope.pop();
                    done?;
                }
            }
        }
        Ok(())
    }

    fn import(&mut self, file: u32, line: u32, name: &str) -> Result<(), ShaderError> {
        if !self.imported.insert(name.to_string()) {
            return Ok(());
        }
        let Some(text) = (self.shared)(name) else {
            return Err(self.error(file, line, format!("there is no shaders/shared/{name}.wgsl")));
        };
        self.file(format!("shared/{name}.wgsl"), text)
    }

    fn holds(&self, condition: &Condition<'_>) -> Result<bool, String> {
        Ok(match condition {
            Condition::Defined(name) => self.lookup(name).is_some(),
            Condition::NotDefined(name) => self.lookup(name).is_none(),
            Condition::Expression(text) => self.value(text)? != 0,
        })
    }

    fn lookup(&self, name: &str) -> Option<i64> {
        self.scope.iter().rev().find(|(n, _)| n == name).map(|(_, v)| *v).or_else(|| self.defines.get(name))
    }

    fn value(&self, text: &str) -> Result<i64, String> {
        evaluate(text, &|name| self.lookup(name))
    }

    /// One line with its `${…}` replaced.
    fn line(&mut self, file: u32, line: u32, text: &str) -> Result<(), ShaderError> {
        if self.result.lines.len() >= MAX_LINES {
            return Err(self.error(file, line, format!("the kernel unrolls to more than {MAX_LINES} lines")));
        }
        let mut rest = text;
        while let Some(start) = rest.find("${") {
            let Some(len) = rest[start..].find('}') else {
                return Err(self.error(file, line, "a `${` has no `}`".into()));
            };
            let value = self.value(&rest[start + 2..start + len]).map_err(|m| self.error(file, line, m))?;
            self.result.text.push_str(&rest[..start]);
            self.result.text.push_str(&value.to_string());
            rest = &rest[start + len + 1..];
        }
        self.result.text.push_str(rest);
        self.result.text.push('\n');
        self.result.lines.push((file, line));
        Ok(())
    }

    fn error(&self, file: u32, line: u32, message: String) -> ShaderError {
        ShaderError { file: self.result.files[file as usize].clone(), line, message }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(text: &str, defines: &Defines) -> Result<String, String> {
        let shared = |name: &str| match name {
            "one" => Some("fn one() {}"),
            "two" => Some("#import one\nfn two() {}"),
            _ => None,
        };
        stitch_text("test", text, defines, &shared).map(|s| s.text).map_err(|e| e.to_string())
    }

    #[track_caller]
    fn check(text: &str, expect: &str) {
        let defines = Defines::new().set("R", 2).flag("SUBGROUP");
        assert_eq!(run(text, &defines).unwrap().split_whitespace().collect::<Vec<_>>().join(" "), expect);
    }

    #[track_caller]
    fn check_error(text: &str, expect: &str) {
        let message = run(text, &Defines::new().set("R", 2)).unwrap_err();
        assert!(message.contains(expect), "{message}");
    }

    #[test]
    fn loops_unroll_and_paste_values() {
        check("#for r in 0..R\nlet a${r} = ${r * 4}u;\n#end", "let a0 = 0u; let a1 = 4u;");
        check("#for r in 0..R\n#for c in r..R\nx${r}_${c}\n#end\n#end", "x0_0 x0_1 x1_1");
        check("#for r in 1..1\nx\n#end", "");
        check("#for r in 0..R\n#let U = r * 3 + 1\n#for u in 0..U\nx${r}_${u}\n#end\n#end", "x0_0 x1_0 x1_1 x1_2 x1_3");
    }

    #[test]
    fn conditions_select_lines() {
        check("#ifdef SUBGROUP\na\n#else\nb\n#endif", "a");
        check("#ifndef SUBGROUP\na\n#else\nb\n#endif", "b");
        check("#if R == 2\na\n#if R > 2\nc\n#endif\n#endif\nd", "a d");
        check("#for r in 0..2\n#if r == 1\nx${r}\n#endif\n#end", "x1");
    }

    #[test]
    fn imports_come_once() {
        check("#import two\n#import one\nmain", "fn one() {} fn two() {} main");
    }

    #[test]
    fn faults_name_file_and_line() {
        check_error("a\n#for r in 0..R\n", "shaders/kernels/test.wgsl:2: this #for has no #end");
        check_error("#ifdef A\n#end", "test.wgsl:1: this condition has no #endif");
        check_error("#endif", "test.wgsl:1: nothing is open");
        check_error("#import three", "there is no shaders/shared/three.wgsl");
        check_error("x\nx${Q}", "test.wgsl:2: `Q` is not defined");
        check_error("${1", "has no `}`");
        check_error("#elif", "unknown directive #elif");
        check_error("#let U", "expected `#let name = value`");
        check_error("#ifdef R\n#let U = 1\n#endif\n${U}", "test.wgsl:4: `U` is not defined");
        check_error("#for r in 0\n#end", "expected `#for name in from..to`");
        check_error("#for a in 0..1000\n#for b in 0..1000\nx\n#end\n#end", "unrolls to more than");
    }

    #[test]
    fn naga_errors_point_into_the_original_file() {
        let text = "#for r in 0..3\n// filler ${r}\n#end\nfn broken( {}\n";
        let stitched = stitch_text("test", text, &Defines::new(), &|_| None).unwrap();
        let error = stitched.parse().unwrap_err();
        assert_eq!((error.file.as_str(), error.line), ("kernels/test.wgsl", 4), "{error}");
    }

    #[test]
    fn defines_round_trip_as_text() {
        let defines = Defines::new().set("SG", 8).flag("Q4_1").set("C", 4);
        assert_eq!(defines.to_string(), "C=4 Q4_1 SG=8");
        assert_eq!(Defines::parse("C=4 Q4_1 SG=8"), Some(defines));
        assert_eq!(Defines::parse("C=x"), None);
    }
}
