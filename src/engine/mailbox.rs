//! The event channel of one run: bounded by merging, so that the engine never waits for a client.
//!
//! Guarantees: [`EventSink::push`] never blocks; no text is lost, at a full mailbox deltas of one choice merge into one
//! event, never those of different choices; the
//! terminal event always arrives, exactly once, and nothing follows it; a sink that is dropped without a terminal event
//! leaves [`RunError::ShutDown`]. It does not attempt to keep every progress event: at a full mailbox the newest wins.

use crate::ids::RequestId;
use crate::protocol::{EngineEvent, RunError};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Events kept apart before they merge.
const CAPACITY: usize = 64;

struct Mailbox {
    created: Instant,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    events: VecDeque<EngineEvent>,
    /// The client is gone or has asked for the end.
    cancelled: bool,
    /// A terminal event was pushed.
    ended: bool,
    /// The task that waits for the next event.
    waker: Option<Waker>,
    /// By which request telemetry knows the run, where that is not the one it was submitted as.
    known_as: Option<RequestId>,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// The engine's end.
pub struct EventSink(Arc<Mailbox>);

/// The client's end.
pub struct EventStream(Arc<Mailbox>);

/// A connected pair.
pub fn channel() -> (EventSink, EventStream) {
    let mailbox =
        Arc::new(Mailbox { created: Instant::now(), state: Mutex::new(State::default()), changed: Condvar::new() });
    (EventSink(mailbox.clone()), EventStream(mailbox))
}

impl EventSink {
    /// Hands an event over. After the terminal event nothing is accepted.
    pub fn push(&self, event: EngineEvent) {
        let mut state = self.0.lock();
        if state.ended || state.cancelled && !event.is_terminal() {
            return;
        }
        state.ended = event.is_terminal();
        accept(&mut state.events, event);
        let waker = state.waker.take();
        drop(state);
        self.0.changed.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Says by which request telemetry knows the run.
    pub fn rename(&self, request: RequestId) {
        self.0.lock().known_as = Some(request);
    }

    /// When the pair was made: at submit.
    pub fn created(&self) -> Instant {
        self.0.created
    }

    /// True once the client dropped its end or cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.lock().cancelled
    }
}

impl Drop for EventSink {
    fn drop(&mut self) {
        self.push(EngineEvent::Failed { error: RunError::ShutDown });
    }
}

impl std::fmt::Debug for EventSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EventSink")
    }
}

/// Queues an event, merging or dropping where the queue is full.
fn accept(events: &mut VecDeque<EngineEvent>, event: EngineEvent) {
    let is_full = events.len() >= CAPACITY;
    if is_full && let EngineEvent::Text { choice, .. } = &event {
        let choice = *choice;
        // Choices take turns: a choice's last text may be further back. There is at most one more for each choice.
        let same =
            |waiting: &&mut EngineEvent| matches!(waiting, EngineEvent::Text { choice: of, .. } if *of == choice);
        match events.iter_mut().rev().find(same) {
            Some(waiting) => merge(waiting, event),
            None => events.push_back(event),
        }
        return;
    }
    match (event, events.back_mut()) {
        // Progress is a level, not a sequence: only the newest matters.
        (event @ EngineEvent::Reading { .. }, Some(last @ EngineEvent::Reading { .. })) => *last = event,
        (EngineEvent::Reading { .. } | EngineEvent::Preempted { .. }, Some(_)) if is_full => {}
        (event, _) => events.push_back(event),
    }
}

/// Appends a text to one of the same choice.
fn merge(waiting: &mut EngineEvent, event: EngineEvent) {
    if let (
        EngineEvent::Text { delta, tokens, logprobs, .. },
        EngineEvent::Text { delta: more, tokens: more_tokens, logprobs: more_logprobs, .. },
    ) = (waiting, event)
    {
        delta.push_str(&more);
        tokens.extend(more_tokens);
        logprobs.extend(more_logprobs);
    }
}

impl EventStream {
    /// The next event, if one is there.
    pub fn try_recv(&self) -> Option<EngineEvent> {
        self.0.lock().events.pop_front()
    }

    /// Waits for the next event; `None` after the terminal event was taken.
    pub fn recv(&self) -> Option<EngineEvent> {
        let mut state = self.0.lock();
        loop {
            if let Some(event) = state.events.pop_front() {
                return Some(event);
            }
            if state.ended {
                return None;
            }
            state = self.0.changed.wait(state).unwrap_or_else(|e| e.into_inner());
        }
    }

    /// The next event for a task, which is woken once there is one; `None` after the terminal event was taken.
    pub fn poll_recv(&self, cx: &mut Context<'_>) -> Poll<Option<EngineEvent>> {
        let mut state = self.0.lock();
        if let Some(event) = state.events.pop_front() {
            return Poll::Ready(Some(event));
        }
        if state.ended {
            return Poll::Ready(None);
        }
        match &mut state.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        Poll::Pending
    }

    /// Waits at most this long; `None` when nothing came or the terminal event was taken.
    pub fn recv_timeout(&self, timeout: Duration) -> Option<EngineEvent> {
        let deadline = Instant::now() + timeout;
        let mut state = self.0.lock();
        loop {
            if let Some(event) = state.events.pop_front() {
                return Some(event);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if state.ended || left.is_zero() {
                return None;
            }
            state = self.0.changed.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    /// True when the terminal event was taken.
    pub fn is_finished(&self) -> bool {
        let state = self.0.lock();
        state.ended && state.events.is_empty()
    }

    /// By which request telemetry knows the run, where it is known by another than it was submitted as.
    pub fn known_as(&self) -> Option<RequestId> {
        self.0.lock().known_as
    }

    /// Tells the engine that nobody listens any more.
    pub fn cancel(&self) {
        self.0.lock().cancelled = true;
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{FinishReason, RunTimings, Usage};

    fn text(delta: &str, token: u32) -> EngineEvent {
        EngineEvent::Text { choice: 0, delta: delta.into(), tokens: vec![token], logprobs: Vec::new() }
    }

    fn finished() -> EngineEvent {
        EngineEvent::Finished {
            reason: FinishReason::MaxTokens,
            usage: Usage::default(),
            timings: RunTimings::default(),
        }
    }

    #[test]
    fn slow_client_gets_merged_text_and_loses_none() {
        let (sink, stream) = channel();
        for i in 0..1000u32 {
            sink.push(text(&format!("{i} "), i));
        }
        sink.push(finished());
        let (mut all, mut ids, mut num_events) = (String::new(), Vec::new(), 0);
        while let Some(event) = stream.recv() {
            num_events += 1;
            if let EngineEvent::Text { delta, tokens, .. } = event {
                all.push_str(&delta);
                ids.extend(tokens);
            }
        }
        assert!(num_events <= CAPACITY + 1, "{num_events} events kept");
        assert_eq!(ids, (0..1000).collect::<Vec<_>>());
        assert_eq!(all, (0..1000).map(|i| format!("{i} ")).collect::<String>());
    }

    #[test]
    fn texts_of_different_choices_never_merge_and_the_mailbox_stays_bounded() {
        let (sink, stream) = channel();
        for i in 0..4000u32 {
            let (choice, token) = (i % 7, i / 7);
            sink.push(EngineEvent::Text { choice, delta: format!("{choice}"), tokens: vec![token], logprobs: vec![] });
        }
        let mut ids = vec![Vec::new(); 7];
        let mut num_events = 0;
        while let Some(event) = stream.try_recv() {
            num_events += 1;
            let EngineEvent::Text { choice, delta, tokens, .. } = event else { panic!("{event:?}") };
            assert!(delta.chars().all(|c| c.to_digit(10) == Some(choice)) && delta.len() == tokens.len(), "{delta}");
            ids[choice as usize].extend(tokens);
        }
        assert!(num_events <= CAPACITY + 7, "{num_events} events kept");
        for (choice, ids) in ids.iter().enumerate() {
            assert_eq!(*ids, (0..(4000 - choice as u32).div_ceil(7)).collect::<Vec<_>>(), "choice {choice}");
        }
    }

    #[test]
    fn nothing_follows_the_terminal_event() {
        let (sink, stream) = channel();
        sink.push(finished());
        sink.push(text("late", 1));
        drop(sink);
        assert_eq!(stream.recv(), Some(finished()));
        assert_eq!(stream.recv(), None);
        assert!(stream.is_finished());
    }

    #[test]
    fn dropped_sink_ends_the_run() {
        let (sink, stream) = channel();
        sink.push(text("a", 1));
        drop(sink);
        assert_eq!(stream.recv(), Some(text("a", 1)));
        assert_eq!(stream.recv(), Some(EngineEvent::Failed { error: RunError::ShutDown }));
        assert_eq!(stream.recv(), None);
    }

    #[test]
    fn dropped_client_is_seen_by_the_engine() {
        let (sink, stream) = channel();
        assert!(!sink.is_cancelled());
        drop(stream);
        assert!(sink.is_cancelled());
        sink.push(text("unread", 1));
    }

    #[test]
    fn a_waiting_task_is_woken_by_the_next_event() {
        let (sink, stream) = channel();
        let engine = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(5));
            sink.push(text("a", 1));
            std::thread::sleep(Duration::from_millis(5));
            sink.push(finished());
        });
        let next = || pollster::block_on(std::future::poll_fn(|cx| stream.poll_recv(cx)));
        assert_eq!((next(), next(), next()), (Some(text("a", 1)), Some(finished()), None));
        engine.join().unwrap();
    }

    #[test]
    fn progress_keeps_only_the_newest() {
        let (sink, stream) = channel();
        for computed in 0..5 {
            sink.push(EngineEvent::Reading { computed, total: 9 });
        }
        assert_eq!(stream.try_recv(), Some(EngineEvent::Reading { computed: 4, total: 9 }));
        assert_eq!(stream.try_recv(), None);
        assert_eq!(stream.recv_timeout(Duration::from_millis(1)), None);
    }
}
