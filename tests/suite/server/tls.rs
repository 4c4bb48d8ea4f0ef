//! The server over TLS.

use super::{TIMEOUT, TestServer};
use kvasir::engine::EngineHandle;
use kvasir::engine::options::FakeOptions;
use kvasir::server::{ServeError, Server, ServerOptions, TlsFiles};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;

/// A certificate for 127.0.0.1 and its key, as files.
fn files(dir: &Path) -> TlsFiles {
    let CertifiedKey { cert, signing_key } =
        generate_simple_self_signed(["127.0.0.1".to_string()]).expect("a certificate");
    let files = TlsFiles { certificates: dir.join("cert.pem"), key: dir.join("key.pem") };
    std::fs::write(&files.certificates, cert.pem()).expect("written");
    std::fs::write(&files.key, signing_key.serialize_pem()).expect("written");
    files
}

fn client(trusted: Option<&Path>) -> reqwest::Client {
    // Another test may have set it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = reqwest::Client::builder().timeout(TIMEOUT).no_proxy();
    let builder = match trusted {
        Some(path) => {
            let pem = std::fs::read(path).expect("a certificate");
            builder.tls_certs_only([reqwest::Certificate::from_pem(&pem).expect("a certificate")])
        }
        None => builder.tls_certs_only([]),
    };
    builder.build().expect("a client")
}

#[test]
fn clients_that_trust_the_certificate_are_answered_and_others_are_not() {
    let dir = tempfile::tempdir().expect("a folder");
    let tls = files(dir.path());
    let engine = EngineHandle::start_fake(FakeOptions::small());
    let server = TestServer::start(engine, ServerOptions { tls: Some(tls.clone()), ..ServerOptions::local() });
    // Whoever says nothing keeps nobody waiting.
    let silent: Vec<TcpStream> = (0..300).map(|_| server.connect()).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let base = format!("https://{}", server.address);
        let body = json!({ "prompt": [1, 2, 3], "max_tokens": 4, "stream": true });
        let trusting = client(Some(&tls.certificates));
        let post = trusting.post(format!("{base}/v1/completions")).header("content-type", "application/json");
        let stream = post.body(body.to_string()).send().await.expect("an answer");
        let text = stream.text().await.expect("a whole stream");
        assert!(text.trim_end().ends_with("data: [DONE]"), "{text}");
        for mut stream in &silent {
            stream.set_nonblocking(true).expect("a socket");
            let read = stream.read(&mut [0]).map_err(|e| e.kind());
            assert_eq!(read, Err(std::io::ErrorKind::WouldBlock), "the answer came after the silent had been cut off");
        }
        let error = client(None).get(format!("{base}/health")).send().await.expect_err("it is not trusted");
        assert!(error.is_connect(), "{error:?}");
        let plain = trusting.get(format!("http://{}/health", server.address)).send().await;
        assert!(plain.is_err(), "{plain:?}");
    });
    let mut plain = server.connect();
    plain.write_all(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").expect("sent");
    let mut answer = Vec::new();
    // The end may be a reset.
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP/1.1 200"), "{answer:?}");
    drop(silent);
}

#[test]
fn files_that_do_not_serve_are_named_before_anything_is_served() {
    let dir = tempfile::tempdir().expect("a folder");
    let good = files(dir.path());
    let other = tempfile::tempdir().expect("a folder");
    let empty = dir.path().join("empty.pem");
    std::fs::write(&empty, "").expect("written");
    let missing = dir.path().join("missing.pem");
    let cases = [
        (TlsFiles { certificates: missing.clone(), ..good.clone() }, &missing),
        (TlsFiles { key: missing.clone(), ..good.clone() }, &missing),
        (TlsFiles { certificates: empty.clone(), ..good.clone() }, &empty),
        (TlsFiles { key: empty.clone(), ..good.clone() }, &empty),
        (TlsFiles { key: good.certificates.clone(), ..good.clone() }, &good.certificates),
    ];
    let bind = |tls: TlsFiles| {
        let engine = EngineHandle::start_fake(FakeOptions::small());
        Server::bind(engine, ServerOptions { tls: Some(tls), ..ServerOptions::local() }).err()
    };
    for (tls, wrong) in cases {
        match bind(tls) {
            Some(ServeError::Tls { path, fault }) => assert!(path == *wrong && !fault.is_empty(), "{path:?}: {fault}"),
            other => panic!("{wrong:?}: {other:?}"),
        }
    }
    let foreign = TlsFiles { key: files(other.path()).key, ..good.clone() };
    let fault = bind(foreign.clone()).expect("a key of another certificate").to_string();
    assert!(fault.contains(&foreign.key.display().to_string()) && fault.contains("does not go with"), "{fault}");
    assert!(bind(good).is_none());
}
