//! `kvasir run-batch`: the requests of a file in OpenAI's batch format, answered by an engine of this process.
//!
//! Guarantees: each line of the input gets one line of output, whatever becomes of it; a run that was cut off goes on where
//! it was when it is started again with the same files; lines of the output are whole, in the order in which answers came.

use super::args::{ModelArgs, PoolingArg};
use super::error::{CliError, CliResult, Exit};
use super::{interrupt, out, session};
use crate::server::ServerOptions;
use crate::server::local::{LocalAnswer, LocalApi};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Paths that a line may name.
const PATHS: [&str; 5] = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages"];
/// Between looks at Ctrl-C.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Clone, Debug, clap::Args)]
pub struct RunBatchArgs {
    /// Requests, a JSON object per line: custom_id, method, url, body
    #[arg(short, long, value_name = "FILE")]
    pub input_file: PathBuf,
    /// Answers, a JSON object per line; requests that are answered there already are left out
    #[arg(short, long, value_name = "FILE")]
    pub output_file: PathBuf,
    /// Requests that are with the engine at a time (default: twice --max-num-seqs)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_concurrency: Option<u32>,
    /// What requests call the model (repeatable)
    #[arg(long, value_name = "NAME", num_args = 1..)]
    pub served_model_name: Vec<String>,
    /// Print a summary as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub pooling: PoolingArg,
    #[command(flatten)]
    pub model: ModelArgs,
}

/// A line of the input.
#[derive(Clone, Debug, PartialEq)]
struct Line {
    custom_id: Value,
    /// Where to post what; the error is for the line alone.
    request: Result<(String, Value), (&'static str, String)>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    skipped: usize,
    completed: usize,
    failed: usize,
}

pub fn run(args: &RunBatchArgs) -> CliResult {
    // Before the model is read, so that a wrong name shows at once.
    let lines = read_lines(&args.input_file)?;
    let (done, mut output) = open_output(&args.output_file)?;
    let num_lines = lines.len();
    let pending: VecDeque<Line> =
        lines.into_iter().filter(|line| !done.contains(&line.custom_id.to_string())).collect();
    let mut counts = Counts { skipped: num_lines - pending.len(), ..Counts::default() };
    let started = Instant::now();
    if !pending.is_empty() {
        let session = session::open(&args.model, None, |options| {
            options.max_queue = options.max_queue.max(args.max_concurrency.unwrap_or(0));
        })?;
        let concurrency = args.max_concurrency.unwrap_or(2 * session.model.max_num_seqs) as usize;
        let options = ServerOptions {
            served_names: args.served_model_name.clone(),
            max_requests_per_key: usize::MAX,
            pooling: args.pooling.pooling(),
            ..ServerOptions::local()
        };
        let api = LocalApi::new(session.engine.clone(), options);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let result = runtime.block_on(answer_all(&api, pending, concurrency, &mut output, &mut counts));
        runtime.shutdown_background();
        session.engine.shutdown();
        result?;
    }
    report(args, num_lines, counts, started.elapsed())
}

fn report(args: &RunBatchArgs, num_lines: usize, counts: Counts, elapsed: Duration) -> CliResult {
    let seconds = elapsed.as_secs_f64();
    if args.json {
        out::json(&json!({
            "requests": num_lines, "skipped": counts.skipped, "completed": counts.completed, "failed": counts.failed,
            "seconds": seconds,
        }))?;
    } else {
        let Counts { skipped, completed, failed } = counts;
        let before = if skipped > 0 { format!(", {skipped} were answered before") } else { String::new() };
        out::note(&format!("{completed} requests answered, {failed} failed{before}, in {seconds:.1} s"));
    }
    Ok(Exit::Ok)
}

fn read_lines(path: &Path) -> Result<Vec<Line>, CliError> {
    let fault = |e: std::io::Error| CliError::usage(format!("cannot read the requests: {e}: {}", path.display()));
    let mut lines = Vec::new();
    let mut numbers: HashMap<String, usize> = HashMap::new();
    for (i, bytes) in BufReader::new(File::open(path).map_err(fault)?).split(b'\n').enumerate() {
        let bytes = bytes.map_err(fault)?;
        if bytes.trim_ascii().is_empty() {
            continue;
        }
        let line = parse(i + 1, &bytes);
        // Answers are told apart by their ids, also when an ended batch goes on.
        if let Some(first) = numbers.insert(line.custom_id.to_string(), i + 1) {
            let message = format!("lines {first} and {} have the custom_id {}", i + 1, line.custom_id);
            return Err(CliError::usage(format!("{message}: {}", path.display())));
        }
        lines.push(line);
    }
    Ok(lines)
}

fn parse(number: usize, line: &[u8]) -> Line {
    let nameless = Value::from(format!("line {number}"));
    let value: Value = match serde_json::from_slice(line) {
        Ok(value) => value,
        Err(e) => {
            let message = format!("line {number} is not valid JSON: {e}");
            return Line { custom_id: nameless, request: Err(("invalid_json_line", message)) };
        }
    };
    let custom_id = value.get("custom_id").filter(|id| id.is_string()).cloned();
    let (method, url) = (value["method"].as_str().unwrap_or("POST"), value["url"].as_str().unwrap_or_default());
    let request = if custom_id.is_none() {
        Err(("missing_required_parameter", format!("line {number} has no custom_id")))
    } else if !method.eq_ignore_ascii_case("post") || !PATHS.contains(&url) {
        Err(("invalid_url", format!("{method} `{url}` is not served in a batch")))
    } else if !value["body"].is_object() {
        Err(("missing_required_parameter", "the request has no body".into()))
    } else {
        Ok((url.to_owned(), value["body"].clone()))
    };
    Line { custom_id: custom_id.unwrap_or(nameless), request }
}

/// Where answers go.
struct Output {
    file: File,
    path: PathBuf,
}

impl Output {
    fn write(&mut self, answer: &Value) -> Result<(), CliError> {
        let fault = |e| {
            CliError::failure(format!("cannot write the answers: {e}: {}", self.path.display()))
                .with_fix("make room there; the same command goes on where this one ended")
        };
        self.file.write_all(format!("{answer}\n").as_bytes()).map_err(fault)
    }
}

/// The ids that the output has, and the output, ready for further lines. A line that was cut off is cut away.
fn open_output(path: &Path) -> Result<(HashSet<String>, Output), CliError> {
    let fault = |e: std::io::Error| CliError::usage(format!("cannot write the answers: {e}: {}", path.display()));
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(fault)?;
    let mut done = HashSet::new();
    let mut whole = 0;
    let mut reader = BufReader::new(&file);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).map_err(fault)? > 0 {
        let answer: Option<Value> = serde_json::from_slice(&line).ok().filter(|_| line.ends_with(b"\n"));
        let Some(answer) = answer.filter(|answer| answer.get("custom_id").is_some()) else {
            if line.ends_with(b"\n") {
                let message = format!("the file holds something else than answers: {}", path.display());
                return Err(CliError::usage(message).with_fix("choose another --output-file"));
            }
            break;
        };
        done.insert(answer["custom_id"].to_string());
        whole += line.len() as u64;
        line.clear();
    }
    file.set_len(whole).map_err(fault)?;
    file.seek(SeekFrom::Start(whole)).map_err(fault)?;
    Ok((done, Output { file, path: path.to_owned() }))
}

async fn answer_all(
    api: &LocalApi,
    mut pending: VecDeque<Line>,
    concurrency: usize,
    output: &mut Output,
    counts: &mut Counts,
) -> Result<(), CliError> {
    let bar = bar(pending.len());
    let mut tasks: JoinSet<Value> = JoinSet::new();
    loop {
        while tasks.len() < concurrency
            && let Some(line) = pending.pop_front()
        {
            let api = api.clone();
            tasks.spawn(async move { answer(&api, line).await });
        }
        let answered = tokio::time::timeout(POLL_INTERVAL, tasks.join_next()).await;
        if let Err(interrupted) = interrupt::check() {
            bar.finish_and_clear();
            return Err(interrupted.with_fix("the same command goes on where this one ended"));
        }
        match answered {
            Err(_) => continue,
            Ok(None) => break,
            Ok(Some(Err(error))) => return Err(CliError::failure(format!("a request was lost: {error}"))),
            Ok(Some(Ok(answer))) => {
                let is_good = answer["response"]["status_code"] == 200;
                *(if is_good { &mut counts.completed } else { &mut counts.failed }) += 1;
                output.write(&answer)?;
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
    Ok(())
}

async fn answer(api: &LocalApi, line: Line) -> Value {
    let (response, error) = match line.request {
        Err((code, message)) => (Value::Null, json!({ "code": code, "message": message })),
        Ok((path, body)) => {
            let LocalAnswer { status, request_id, body } = api.post(&path, &body).await;
            (json!({ "status_code": status, "request_id": request_id, "body": body }), Value::Null)
        }
    };
    let id = format!("batch_req_{}", uuid::Uuid::now_v7().simple());
    json!({ "id": id, "custom_id": line.custom_id, "response": response, "error": error })
}

fn bar(num_requests: usize) -> ProgressBar {
    if !out::shows_progress() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{msg} {wide_bar:.cyan} {pos}/{len} ({eta})");
    let bar = ProgressBar::new(num_requests as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.with_message("Answering requests")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::EngineHandle;
    use crate::engine::options::FakeOptions;

    fn line(id: &str, max_tokens: u32) -> String {
        let body = json!({ "prompt": "Once", "max_tokens": max_tokens, "seed": 1 });
        json!({ "custom_id": id, "method": "POST", "url": "/v1/completions", "body": body }).to_string()
    }

    fn answer_file(input: &str, output: &Path) -> Counts {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("input.jsonl");
        std::fs::write(&path, input).unwrap();
        let lines = read_lines(&path).unwrap();
        let (done, mut file) = open_output(output).unwrap();
        let num_lines = lines.len();
        let pending: VecDeque<Line> =
            lines.into_iter().filter(|line| !done.contains(&line.custom_id.to_string())).collect();
        let mut counts = Counts { skipped: num_lines - pending.len(), ..Counts::default() };
        let engine = EngineHandle::start_fake(FakeOptions::small());
        let api = LocalApi::new(engine, ServerOptions::local());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(answer_all(&api, pending, 3, &mut file, &mut counts)).unwrap();
        counts
    }

    fn answers(path: &Path) -> Vec<Value> {
        std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn each_line_gets_an_answer_and_faults_stay_with_their_line() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("output.jsonl");
        let odd = json!({ "custom_id": "odd", "url": "/v1/files", "body": {} });
        let chat = json!({
            "custom_id": "chat", "method": "POST", "url": "/v1/chat/completions",
            "body": { "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 5 },
        });
        let stream =
            json!({ "custom_id": "stream", "url": "/v1/completions", "body": { "prompt": "x", "stream": true } });
        let good: Vec<String> = (0..7).map(|i| line(&format!("good {i}"), 4)).collect();
        let input = format!("{}\n{{\n{odd}\n\n{chat}\n{stream}\n{}\n", good.join("\n"), line("bad", 0));
        assert_eq!(answer_file(&input, &output), Counts { skipped: 0, completed: 8, failed: 4 });
        let all = answers(&output);
        let of = |id: &str| all.iter().find(|answer| answer["custom_id"] == id).unwrap();
        assert_eq!(all.len(), 12);
        assert_eq!(of("good 3")["response"]["body"]["usage"]["completion_tokens"], 4);
        assert!(of("good 3")["error"].is_null());
        assert_eq!(of("chat")["response"]["body"]["object"], "chat.completion");
        assert_eq!(of("bad")["response"]["status_code"], 400);
        assert_eq!(of("bad")["response"]["body"]["error"]["param"], "max_tokens");
        assert_eq!(of("stream")["response"]["status_code"], 400);
        assert_eq!(of("odd")["error"]["code"], "invalid_url");
        assert_eq!(of("line 8")["error"]["code"], "invalid_json_line");
    }

    #[test]
    fn an_id_that_stands_twice_is_refused_and_a_line_that_is_no_text_is_answered() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("input.jsonl");
        std::fs::write(&path, format!("{}\n\n{}\n", line("a", 1), line("a", 2))).unwrap();
        let fault = read_lines(&path).expect_err("twice").message;
        assert!(fault.contains("lines 1 and 3") && fault.contains("\"a\""), "{fault}");
        std::fs::write(&path, [line("a", 1).as_bytes(), b"\n\xff\xfe\n", line("b", 1).as_bytes()].concat()).unwrap();
        let lines = read_lines(&path).unwrap_or_else(|e| panic!("{}", e.message));
        let faulty: Vec<usize> = (0..lines.len()).filter(|i| lines[*i].request.is_err()).collect();
        assert_eq!((lines.len(), faulty), (3, vec![1]));
    }

    #[test]
    fn a_run_that_was_cut_off_goes_on_where_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("output.jsonl");
        let input: Vec<String> = (0..6).map(|i| line(&format!("r{i}"), 3)).collect();
        answer_file(&input[..3].join("\n"), &output);
        let before = std::fs::read_to_string(&output).unwrap();
        std::fs::write(&output, format!("{before}{{\"id\": \"batch_req_cut")).unwrap();
        assert_eq!(answer_file(&input.join("\n"), &output), Counts { skipped: 3, completed: 3, failed: 0 });
        let after = std::fs::read_to_string(&output).unwrap();
        assert!(after.starts_with(&before));
        let ids: HashSet<String> = answers(&output).iter().map(|answer| answer["custom_id"].to_string()).collect();
        assert_eq!(ids.len(), 6);
        let file = File::open(&output).unwrap();
        let fault = Output { file, path: output.clone() }.write(&json!({})).expect_err("it cannot be written").message;
        assert!(fault.contains("cannot write the answers") && fault.contains("output.jsonl"), "{fault}");
        std::fs::write(&output, "a diary\n").unwrap();
        assert!(open_output(&output).is_err(), "another file is not overwritten");
    }
}
