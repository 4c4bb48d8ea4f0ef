//! The downloader against a small HTTP server on the loopback interface that cuts, lies and counts.

use super::*;
use sha2::{Digest, Sha256};
use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// What the server does with the weights.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// The first answer ends in the middle.
    CutOnce,
    /// Every answer has one wrong byte.
    FlippedByte,
    /// Ranges are ignored after a cut.
    CutOnceWithoutRanges,
}

struct Server {
    endpoint: String,
    /// Request line and range of each request.
    seen: Arc<Mutex<Vec<String>>>,
}

const CONFIG: &[u8] = b"{}";

fn weights() -> Vec<u8> {
    (0..300_000u32).map(|i| ((i * 2_654_435_761) >> 13) as u8).collect()
}

impl Server {
    fn start(fault: Fault) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { return };
                serve(stream, fault, &log);
            }
        });
        Server { endpoint, seen }
    }

    fn requests_for(&self, path: &str) -> usize {
        self.seen.lock().expect("no panic while held").iter().filter(|line| line.contains(path)).count()
    }

    fn access(&self, cache: &Path) -> HubAccess {
        HubAccess {
            endpoint: self.endpoint.clone(),
            token: Some("secret".into()),
            offline: false,
            cache: cache.to_owned(),
        }
    }
}

/// Answers one request and closes the connection.
fn serve(mut stream: TcpStream, fault: Fault, log: &Mutex<Vec<String>>) {
    let mut lines = BufReader::new(stream.try_clone().expect("cloned")).lines();
    let Some(Ok(request)) = lines.next() else { return };
    let headers: Vec<String> = lines.map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
    let header = |name: &str| {
        headers.iter().find_map(|h| h.to_lowercase().strip_prefix(name).map(|value| value.trim().to_owned()))
    };
    let range = header("range: bytes=").and_then(|r| r.trim_end_matches('-').parse::<usize>().ok());
    let is_first_for_weights = {
        let mut log = log.lock().expect("no panic while held");
        log.push(format!("{request} range {range:?}"));
        log.iter().filter(|l| l.contains("model.safetensors")).count() == 1
    };
    let (mut body, known) = body_of(&request);
    let is_let_in = header("authorization: ").as_deref() == Some("bearer secret");
    if fault == Fault::FlippedByte && request.contains("model.safetensors") {
        body[1234] ^= 1;
    }
    let start = range.filter(|_| fault != Fault::CutOnceWithoutRanges).unwrap_or(0);
    let status = match (known, start) {
        _ if !is_let_in => "401 Unauthorized".to_owned(),
        (false, _) => "404 Not Found".to_owned(),
        (true, 0) => "200 OK".to_owned(),
        (true, start) => {
            let total = body.len();
            format!("206 Partial Content\r\nContent-Range: bytes {start}-{}/{total}", total - 1)
        }
    };
    let rest = &body[start..];
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", rest.len());
    let cuts = matches!(fault, Fault::CutOnce | Fault::CutOnceWithoutRanges) && is_first_for_weights;
    let sent = if cuts { &rest[..rest.len() / 2] } else { rest };
    // The client may have gone away, which some tests do on purpose.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(sent));
}

fn body_of(request: &str) -> (Vec<u8>, bool) {
    let sha256: String = Sha256::digest(weights()).iter().map(|b| format!("{b:02x}")).collect();
    if request.contains("/api/models/org/tiny/revision/main") {
        let json = serde_json::json!({"sha": "c0ffee", "siblings": [
            {"rfilename": "config.json", "size": CONFIG.len(), "blobId": "aa11"},
            {"rfilename": "README.md", "size": 5, "blobId": "bb22"},
            {"rfilename": "model.safetensors", "size": weights().len(), "blobId": "cc33",
             "lfs": {"sha256": sha256, "size": weights().len()}}]});
        return (json.to_string().into_bytes(), true);
    }
    match request.split(' ').nth(1) {
        Some("/org/tiny/resolve/c0ffee/config.json") => (CONFIG.to_vec(), true),
        Some("/org/tiny/resolve/c0ffee/model.safetensors") => (weights(), true),
        _ => (b"no".to_vec(), false),
    }
}

fn fetch(server: &Server, cache: &Path) -> Result<PathBuf, FetchError> {
    download("org/tiny", &server.access(cache), &mut |_| (), &AtomicBool::new(false))
}

#[test]
fn a_checkpoint_lands_in_the_cache_layout_and_is_not_fetched_twice() {
    let (server, dir) = (Server::start(Fault::None), tempfile::tempdir().expect("a temporary folder"));
    let mut last = None;
    let path = download("org/tiny", &server.access(dir.path()), &mut |p| last = Some(p), &AtomicBool::new(false));
    let path = path.unwrap_or_else(|e| panic!("{e}"));
    let repo = dir.path().join("models--org--tiny");
    assert_eq!(path, repo.join("snapshots/c0ffee"));
    assert_eq!(std::fs::read(path.join("model.safetensors")).expect("there"), weights());
    assert_eq!(std::fs::read(path.join("config.json")).expect("there"), CONFIG);
    assert!(!path.join("README.md").exists());
    assert_eq!(std::fs::read_to_string(repo.join("refs/main")).expect("there"), "c0ffee");
    let last = last.expect("progress was reported");
    assert_eq!((last.stage, last.done_bytes, last.total_bytes), (FetchStage::Verifying, 300_000, 300_000));
    assert_eq!(fetch(&server, dir.path()).expect("again"), path);
    assert_eq!(server.requests_for("model.safetensors"), 1);
}

#[test]
fn a_cut_download_goes_on_where_it_stopped() {
    let (server, dir) = (Server::start(Fault::CutOnce), tempfile::tempdir().expect("a temporary folder"));
    let path = fetch(&server, dir.path()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(std::fs::read(path.join("model.safetensors")).expect("there"), weights());
    let seen = server.seen.lock().expect("no panic while held").clone();
    assert!(
        seen.iter().any(|line| line.contains("model.safetensors") && line.ends_with("range Some(150000)")),
        "{seen:?}"
    );
}

#[test]
fn a_server_without_ranges_is_asked_for_the_whole_file_again() {
    let server = Server::start(Fault::CutOnceWithoutRanges);
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = fetch(&server, dir.path()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(std::fs::read(path.join("model.safetensors")).expect("there"), weights());
}

#[test]
fn a_flipped_byte_is_rejected_and_leaves_no_file() {
    let (server, dir) = (Server::start(Fault::FlippedByte), tempfile::tempdir().expect("a temporary folder"));
    let error = fetch(&server, dir.path()).expect_err("wrong content");
    assert!(matches!(error, FetchError::Checksum { .. }), "{error}");
    let repo = dir.path().join("models--org--tiny");
    let blobs: Vec<_> =
        std::fs::read_dir(repo.join("blobs")).expect("there").flatten().map(|e| e.file_name()).collect();
    assert_eq!(blobs, ["aa11"], "only the small file stays");
    assert!(!repo.join("snapshots/c0ffee/model.safetensors").exists());
}

#[test]
fn a_cancel_keeps_the_part_and_the_next_try_completes_it() {
    let (server, dir) = (Server::start(Fault::None), tempfile::tempdir().expect("a temporary folder"));
    let cancel = AtomicBool::new(false);
    let stop = |p: FetchProgress| cancel.store(p.file == "model.safetensors", Ordering::Relaxed);
    let mut stop = stop;
    let result = download("org/tiny", &server.access(dir.path()), &mut stop, &cancel);
    assert!(matches!(result, Err(FetchError::Cancelled)), "{result:?}");
    let blobs = dir.path().join("models--org--tiny/blobs");
    let complete = std::fs::read_dir(&blobs).expect("there").flatten().filter(|e| {
        e.metadata().is_ok_and(|m| m.len() == 300_000) && !e.file_name().to_string_lossy().ends_with(".incomplete")
    });
    assert_eq!(complete.count(), 0);
    let path = fetch(&server, dir.path()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(std::fs::read(path.join("model.safetensors")).expect("there"), weights());
}

#[test]
fn a_gated_model_says_what_to_do_with_and_without_a_token() {
    let (server, dir) = (Server::start(Fault::None), tempfile::tempdir().expect("a temporary folder"));
    let fault_with = |token: Option<&str>| {
        let access = HubAccess { token: token.map(str::to_owned), ..server.access(dir.path()) };
        let fault = download("org/tiny", &access, &mut |_| (), &AtomicBool::new(false)).expect_err("not let in");
        assert!(matches!(fault, FetchError::Status { status: 401, .. }), "{fault}");
        fault.to_string()
    };
    assert!(fault_with(None).contains("set HF_TOKEN"), "{}", fault_with(None));
    let wrong = fault_with(Some("wrong"));
    assert!(wrong.contains("the token is not accepted") && !wrong.contains("wrong"), "{wrong}");
    assert!(!dir.path().join("models--org--tiny").exists());
    fetch(&server, dir.path()).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn offline_takes_what_is_there_as_a_whole() {
    let (server, dir) = (Server::start(Fault::CutOnce), tempfile::tempdir().expect("a temporary folder"));
    let offline = HubAccess { offline: true, ..server.access(dir.path()) };
    let take = |id: &str| download(id, &offline, &mut |_| (), &AtomicBool::new(false));
    assert!(matches!(take("org/tiny"), Err(FetchError::Offline { .. })));
    let path = fetch(&server, dir.path()).unwrap_or_else(|e| panic!("{e}"));
    let asked = server.requests_for("/");
    assert_eq!(take("org/tiny").expect("it is there"), path);
    assert_eq!(take("org/tiny@c0ffee").expect("by its commit"), path);
    assert!(matches!(take("org/tiny@other"), Err(FetchError::Offline { .. })));
    assert_eq!(server.requests_for("/"), asked, "the hub is not asked");
    std::fs::remove_file(path.join("model.safetensors")).expect("removed");
    assert!(matches!(take("org/tiny"), Err(FetchError::Offline { .. })), "the weights are gone");
}

#[test]
fn offline_and_missing_models_say_so() {
    let (server, dir) = (Server::start(Fault::None), tempfile::tempdir().expect("a temporary folder"));
    let mut access = server.access(dir.path());
    let missing = download("org/none", &access, &mut |_| (), &AtomicBool::new(false)).expect_err("not there");
    assert!(matches!(missing, FetchError::Status { status: 404, .. }), "{missing}");
    access.offline = true;
    let offline = download("org/tiny", &access, &mut |_| (), &AtomicBool::new(false)).expect_err("offline");
    assert!(matches!(offline, FetchError::Offline { .. }), "{offline}");
    assert!(!format!("{access:?}").contains("secret"), "tokens are not shown");
}
