//! Answers as server-sent events: one task per stream between the engine's mailbox and the socket.
//!
//! Guarantees: the engine never waits for a client: while a socket is full the mailbox merges text, and a client that
//! reads nothing for too long is cut off; a disconnect drops the runs at once; a stream with nothing to say sends a
//! comment now and then; a fault ends it with one error event.

use super::app::App;
use super::error::ApiError;
use super::generation::Generation;
use super::reducer::{Delta, Reducer, Tally};
use axum::body::{Body, Bytes};
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Says which request of the step records an answer is.
const ENGINE_REQUEST: HeaderName = HeaderName::from_static("x-kvasir-request");
/// Pieces that may wait for the socket.
const CHANNEL: usize = 8;
/// Events that are there already go out in one piece of about this size.
const PIECE_BYTES: usize = 16 << 10;

/// The client read nothing for too long.
#[derive(Debug, thiserror::Error)]
#[error("the client does not read its stream")]
struct CutOff;

/// Writes the events of one kind of stream.
pub trait Encode: Send + 'static {
    fn delta(&mut self, delta: Delta, tally: Tally, out: &mut String);
    /// After the last delta.
    fn end(&mut self, tally: Tally, out: &mut String);
    /// Instead of the end.
    fn fail(&mut self, error: &ApiError, out: &mut String) {
        out.push_str("data: ");
        out.push_str(&error.json());
        out.push_str("\n\n");
    }
}

/// Appends one `data:` event.
pub fn data(out: &mut String, event: &impl Serialize) {
    out.push_str("data: ");
    out.push_str(&serde_json::to_string(event).expect("events hold strings, numbers and lists"));
    out.push_str("\n\n");
}

/// Appends one event whose name is the `type` that it begins with.
pub fn named(out: &mut String, event: &impl Serialize) {
    let event = serde_json::to_value(event).expect("events hold strings, numbers and lists");
    out.push_str("event: ");
    out.push_str(event["type"].as_str().unwrap_or_default());
    out.push('\n');
    data(out, &event);
}

/// The answer whose body is the stream.
pub fn respond(app: &App, generation: Generation, reducer: Reducer, encoder: impl Encode) -> Response {
    let (sender, mut receiver) = mpsc::channel::<Bytes>(CHANNEL);
    let is_cut_off = Arc::new(AtomicBool::new(false));
    let first_id = generation.first_id();
    let timing = (app.options.keep_alive, app.options.slow_client_timeout);
    tokio::spawn(pump(generation, reducer, encoder, (sender, is_cut_off.clone()), timing));
    // A stream that was cut off must not look like one that came to its end.
    let pieces = futures_util::stream::poll_fn(move |cx| {
        receiver.poll_recv(cx).map(|piece| match piece {
            Some(piece) => Some(Ok(piece)),
            None => is_cut_off.swap(false, Ordering::AcqRel).then_some(Err(CutOff)),
        })
    });
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    let mut response = (headers, Body::from_stream(pieces)).into_response();
    if let Some(id) = first_id {
        response.headers_mut().insert(ENGINE_REQUEST, HeaderValue::from(id));
    }
    response
}

/// Moves events until the end, or until nobody reads any more; the runs are dropped with it.
async fn pump(
    mut generation: Generation,
    mut reducer: Reducer,
    mut encoder: impl Encode,
    (sender, is_cut_off): (mpsc::Sender<Bytes>, Arc<AtomicBool>),
    (keep_alive, slow_client_timeout): (Duration, Duration),
) {
    // Events that say nothing to the client do not put it off.
    let mut speaks_at = Instant::now() + keep_alive;
    loop {
        let mut out = String::new();
        let is_over = tokio::select! {
            event = generation.recv() => {
                let mut next = event;
                loop {
                    if !step(&mut reducer, &mut encoder, next, &mut out) {
                        break true;
                    }
                    next = match generation.try_recv() {
                        Some(event) if out.len() < PIECE_BYTES => Some(event),
                        Some(event) => {
                            if !step(&mut reducer, &mut encoder, Some(event), &mut out) {
                                break true;
                            }
                            break false;
                        }
                        // The end is seen, and waited for, by the next `recv`.
                        None => break false,
                    };
                }
            }
            () = sender.closed() => return,
            () = tokio::time::sleep_until(speaks_at) => {
                out.push_str(": keep-alive\n\n");
                false
            }
        };
        if !out.is_empty() {
            speaks_at = Instant::now() + keep_alive;
            match tokio::time::timeout(slow_client_timeout, sender.send(out.into())).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return,
                Err(_) => {
                    tracing::warn!("a client that does not read its stream was cut off");
                    is_cut_off.store(true, Ordering::Release);
                    return;
                }
            }
        }
        if is_over {
            return;
        }
    }
}

/// Writes one event; false after the last.
fn step(
    reducer: &mut Reducer,
    encoder: &mut impl Encode,
    event: Option<(usize, crate::protocol::EngineEvent)>,
    out: &mut String,
) -> bool {
    let Some((run, event)) = event else {
        encoder.end(reducer.tally(), out);
        return false;
    };
    match reducer.push(run, event) {
        Ok(deltas) => {
            let tally = reducer.tally();
            deltas.into_iter().for_each(|delta| encoder.delta(delta, tally, out));
            true
        }
        Err(error) => {
            encoder.fail(&ApiError::of_run(&error, "prompt"), out);
            false
        }
    }
}
