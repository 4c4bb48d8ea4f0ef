//! Chat templates: the Jinja text that ships with a model, rendered as transformers renders it.
//!
//! Guarantees: equal input gives equal text (the time is an argument); instructions, strings and output of one
//! rendering are paid from [`RENDER_FUEL`], so a runaway template ends in an error and not in a hang; a template's own
//! `raise_exception` comes back as [`TemplateError::Raised`]. It does not attempt to be stricter than Python where
//! Python's own limits (and not the template) would refuse a conversation, and it does not bound lists that a
//! template doubles again and again with `+`, which the engine joins lazily and does not account for.
//!
//! The environment follows `apply_chat_template` of transformers: trimmed blocks, loop controls, Python's methods on
//! strings and dicts, `tojson` with Python's separators, `strftime_now`, `tools` present but none when there are none.

use super::python_json::{self, template_value};
use super::rewrite;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{AutoEscape, Environment, ErrorKind, Output, State};
use std::collections::BTreeMap;

/// Stack of a rendering; only what is used of it takes memory.
const RENDER_STACK_BYTES: usize = 256 << 20;

/// What one rendering may use: about this many instructions, or 64 bytes of data each (256 MB in all).
pub const RENDER_FUEL: u64 = 4_000_000;

/// Templates larger than this are refused; the largest published ones have some 20 KB.
pub const MAX_TEMPLATE_BYTES: usize = 1 << 20;

/// Lists in lists that may be printed.
const MAX_PRINTED_DEPTH: usize = 200;

const NAME: &str = "chat_template";

/// The special tokens that a template may name. Those that a model lacks stay undefined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    pub bos: Option<String>,
    pub eos: Option<String>,
    pub unk: Option<String>,
    pub pad: Option<String>,
}

/// A civil date and time, read by templates through `strftime_now`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    pub year: i16,
    pub month: i8,
    pub day: i8,
    pub hour: i8,
    pub minute: i8,
    pub second: i8,
}

impl Now {
    /// Reads `2024-07-26T12:34:56` (the time may be missing: midnight).
    pub fn parse(text: &str) -> Result<Now, TemplateError> {
        let time: jiff::civil::DateTime =
            text.parse().map_err(|e| TemplateError::BadTime(format!("{text:?} is not a date and time: {e}")))?;
        Ok(Now {
            year: time.year(),
            month: time.month(),
            day: time.day(),
            hour: time.hour(),
            minute: time.minute(),
            second: time.second(),
        })
    }

    fn civil(self) -> Result<jiff::civil::DateTime, TemplateError> {
        jiff::civil::DateTime::new(self.year, self.month, self.day, self.hour, self.minute, self.second, 0)
            .map_err(|e| TemplateError::BadTime(e.to_string()))
    }
}

/// What to render.
pub struct RenderRequest<'a> {
    /// A list of messages, each an object with `role` and `content` and whatever else the template reads.
    pub messages: &'a serde_json::Value,
    /// A list of tool schemas; `None` is seen as none by the template.
    pub tools: Option<&'a serde_json::Value>,
    /// End with the header of the assistant's answer.
    pub add_generation_prompt: bool,
    pub now: Now,
    /// Further variables, such as `enable_thinking`. They may not replace the ones above.
    pub extra: &'a BTreeMap<String, serde_json::Value>,
}

/// Why a template could not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    #[error("the chat template is not a string")]
    NotAString,
    #[error("the chat template has {bytes} bytes, the limit is {limit}")]
    TooLarge { bytes: usize, limit: usize },
    #[error("the chat template cannot be parsed: {0}")]
    Syntax(String),
    /// The template itself refused the conversation.
    #[error("the chat template refuses this conversation: {0}")]
    Raised(String),
    #[error("the chat template does not end within its limits: {0}")]
    OutOfFuel(String),
    #[error("the chat template failed: {0}")]
    Render(String),
    #[error("the date for the chat template is wrong: {0}")]
    BadTime(String),
}

/// A parsed template, ready to render from any thread.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    source: String,
    env: Environment<'static>,
    special: SpecialTokens,
}

impl ChatTemplate {
    /// Parses `source`.
    pub fn new(source: &str, special: SpecialTokens) -> Result<ChatTemplate, TemplateError> {
        if source.len() > MAX_TEMPLATE_BYTES {
            return Err(TemplateError::TooLarge { bytes: source.len(), limit: MAX_TEMPLATE_BYTES });
        }
        let mut env = Environment::new();
        env.set_syntax(white_space_as_transformers()?);
        env.set_fuel(Some(RENDER_FUEL));
        env.set_auto_escape_callback(|_| AutoEscape::None);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        // In Python none cannot be iterated over, and templates rely on it.
        env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
        env.add_filter("tojson", tojson);
        env.add_function("raise_exception", raise_exception);
        env.add_function(rewrite::ADD_MARKUP, rewrite::add_markup);
        env.set_formatter(print_paid);
        env.add_template_owned(NAME, rewrite::rewrite(source)).map_err(|e| TemplateError::Syntax(e.to_string()))?;
        Ok(ChatTemplate { source: source.to_owned(), env, special })
    }

    /// The text it was parsed from: it tells which marks its model writes.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The text of a conversation.
    ///
    /// It is rendered on a thread of its own: a template can build values nested as deep as its fuel allows, and to drop
    /// these takes more stack than a thread usually has.
    pub fn render(&self, request: &RenderRequest<'_>) -> Result<String, TemplateError> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("chat template".into()).stack_size(RENDER_STACK_BYTES);
            let rendering = thread.spawn_scoped(scope, || self.render_here(request));
            let rendering = rendering.map_err(|e| TemplateError::Render(format!("no thread could be started: {e}")))?;
            rendering.join().unwrap_or_else(|_| Err(TemplateError::Render("the template engine panicked".into())))
        })
    }

    fn render_here(&self, request: &RenderRequest<'_>) -> Result<String, TemplateError> {
        let template = self.env.get_template(NAME).map_err(|e| TemplateError::Syntax(e.to_string()))?;
        template.render(self.context(request)?).map_err(|e| classify(&e))
    }

    fn context(&self, request: &RenderRequest<'_>) -> Result<Value, TemplateError> {
        let now = request.now.civil()?;
        let mut vars: BTreeMap<&str, Value> = BTreeMap::new();
        for (name, value) in request.extra {
            vars.insert(name, template_value(value));
        }
        let special = &self.special;
        for (name, token) in [
            ("bos_token", &special.bos),
            ("eos_token", &special.eos),
            ("unk_token", &special.unk),
            ("pad_token", &special.pad),
        ] {
            if let Some(token) = token {
                vars.insert(name, Value::from(token.as_str()));
            }
        }
        vars.insert("messages", template_value(request.messages));
        vars.insert("tools", request.tools.map_or(Value::from(()), template_value));
        vars.insert("documents", Value::from(()));
        vars.insert("add_generation_prompt", Value::from(request.add_generation_prompt));
        vars.insert("strftime_now", Value::from_function(move |format: &str| strftime(now, format)));
        Ok(Value::from_pairs(vars))
    }
}

/// The template in a `tokenizer_config.json`: a string, or a list of named ones of which `default` is taken (else the
/// first). `Ok(None)` when there is none.
pub fn template_of_config(config: &serde_json::Value) -> Result<Option<&str>, TemplateError> {
    use serde_json::Value as Json;
    match config.get("chat_template") {
        None | Some(Json::Null) => Ok(None),
        Some(Json::String(source)) => Ok(Some(source)),
        Some(Json::Array(named)) => {
            let is_default = |entry: &&Json| entry.get("name").and_then(Json::as_str) == Some("default");
            let Some(entry) = named.iter().find(is_default).or(named.first()) else { return Ok(None) };
            entry.get("template").and_then(Json::as_str).map(Some).ok_or(TemplateError::NotAString)
        }
        Some(_) => Err(TemplateError::NotAString),
    }
}

fn white_space_as_transformers() -> Result<SyntaxConfig, TemplateError> {
    let built = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    built.map_err(|e| TemplateError::Syntax(e.to_string()))
}

fn strftime(now: jiff::civil::DateTime, format: &str) -> Result<String, minijinja::Error> {
    jiff::fmt::strtime::format(format, now)
        .map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {e}")))
}

/// Prints a value. Containers are paid for item by item before that: a lazy list may be far longer than the memory it
/// takes, and printing would walk all of it even after its reader had had enough.
fn print_paid(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), minijinja::Error> {
    if let Some(text) = value.as_str() {
        return out.write_str(text).map_err(minijinja::Error::from);
    }
    pay_for_items(state, value, MAX_PRINTED_DEPTH)?;
    write!(out, "{value}").map_err(minijinja::Error::from)
}

fn pay_for_items(state: &State<'_, '_>, value: &Value, depth_left: usize) -> Result<(), minijinja::Error> {
    state.consume_fuel(1 + value.as_str().map_or(0, |text| text.len() as u64 / 64))?;
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
        return Ok(());
    }
    if depth_left == 0 {
        return Err(minijinja::Error::new(ErrorKind::InvalidOperation, "the printed value is nested too deeply"));
    }
    let is_map = value.kind() == ValueKind::Map;
    for item in value.try_iter()?.checked() {
        let item = item?;
        if is_map {
            pay_for_items(state, &value.get_item(&item)?, depth_left - 1)?;
        }
        pay_for_items(state, &item, depth_left - 1)?;
    }
    Ok(())
}

/// Marks an error as the template's own.
#[derive(Debug)]
struct RaisedByTemplate(String);

impl std::fmt::Display for RaisedByTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for RaisedByTemplate {}

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(RaisedByTemplate(message)))
}

fn classify(error: &minijinja::Error) -> TemplateError {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(inner) = source {
        if let Some(raised) = inner.downcast_ref::<RaisedByTemplate>() {
            return TemplateError::Raised(raised.0.clone());
        }
        if inner.downcast_ref::<minijinja::Error>().is_some_and(|e| e.kind() == ErrorKind::OutOfFuel) {
            return TemplateError::OutOfFuel(error.to_string());
        }
        source = inner.source();
    }
    TemplateError::Render(error.to_string())
}

/// `tojson` as transformers has it: `json.dumps` without ASCII escapes and without sorting unless asked for.
fn tojson(state: &State<'_, '_>, value: &Value, options: Kwargs) -> Result<Value, minijinja::Error> {
    // Accepted for compatibility; characters are never escaped to ASCII unless the template asks for it.
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    let indent: Option<usize> = options.get("indent")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    options.assert_all_used()?;
    let separators = match separators.as_deref() {
        None => None,
        Some([item, key]) => Some((item.clone(), key.clone())),
        Some(_) => {
            return Err(minijinja::Error::new(ErrorKind::InvalidOperation, "tojson takes two separators"));
        }
    };
    let style = python_json::Style {
        ensure_ascii: ensure_ascii.unwrap_or(false),
        indent: indent.map(|n| n.min(64)),
        sort_keys: sort_keys.unwrap_or(false),
        separators,
    };
    python_json::dumps(value, &style, &|fuel| state.consume_fuel(fuel)).map(Value::from)
}
