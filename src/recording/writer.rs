//! Writes a recording on a thread of its own.
//!
//! Guarantees: [`Recorder::push`] never waits; at most [`MAX_LINES`] lines wait for the disk; the first fault, a full disk
//! or one that is too slow, ends the recording with one warning, as does its limit of [`MAX_BYTES`]; what was written until
//! then can be read.

use super::{Header, Line};
use std::io::{BufWriter, Write};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::thread::JoinHandle;

/// Lines that wait for the disk at most: some seconds of a fast engine.
const MAX_LINES: usize = 16_384;
/// Longest recording: days of a busy engine.
const MAX_BYTES: u64 = 8 << 30;

/// The engine's end of a recording. Dropping it writes what waits.
#[derive(Debug)]
pub struct Recorder {
    lines: Option<SyncSender<Line>>,
    thread: Option<JoinHandle<()>>,
}

impl Recorder {
    /// Starts with the header.
    pub fn start(out: impl Write + Send + 'static, header: Header) -> std::io::Result<Recorder> {
        let (lines, queue) = sync_channel(MAX_LINES);
        let thread = std::thread::Builder::new().name("recorder".into()).spawn(move || {
            if let Err(error) = write_all(&queue, BufWriter::new(out), MAX_BYTES) {
                tracing::warn!("the recording ends here: {error}");
            }
        })?;
        let mut recorder = Recorder { lines: Some(lines), thread: Some(thread) };
        recorder.push(Line::Header(Box::new(header)));
        Ok(recorder)
    }

    /// Hands a line over. False when the recording has ended: nothing more needs to be handed over.
    pub fn push(&mut self, line: Line) -> bool {
        let Some(lines) = &self.lines else { return false };
        match lines.try_send(line) {
            Ok(()) => true,
            Err(error) => {
                if matches!(error, TrySendError::Full(_)) {
                    tracing::warn!("the recording ends here: {MAX_LINES} lines wait for the disk");
                }
                self.lines = None;
                false
            }
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.lines = None;
        if let Some(thread) = self.thread.take() {
            // It has warned of what went wrong.
            let _ = thread.join();
        }
    }
}

/// Until the sender is gone; whenever nothing waits, what was written is on its way to the disk.
fn write_all(queue: &Receiver<Line>, mut out: impl Write, max_bytes: u64) -> std::io::Result<()> {
    let (mut line_bytes, mut left) = (Vec::new(), max_bytes);
    loop {
        let line = match queue.try_recv() {
            Ok(line) => line,
            Err(TryRecvError::Empty) => {
                out.flush()?;
                let Ok(line) = queue.recv() else { return Ok(()) };
                line
            }
            Err(TryRecvError::Disconnected) => return out.flush(),
        };
        line_bytes.clear();
        serde_json::to_writer(&mut line_bytes, &line)?;
        line_bytes.push(b'\n');
        let Some(rest) = left.checked_sub(line_bytes.len() as u64) else {
            out.flush()?;
            return Err(std::io::Error::other(format!("it has reached {max_bytes} bytes")));
        };
        left = rest;
        out.write_all(&line_bytes)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::TimedOp;
    use crate::scheduler::Op;

    #[test]
    fn a_recording_ends_with_a_whole_line_before_its_limit() {
        let (lines, queue) = sync_channel(8);
        for step in 0..4 {
            lines.send(Line::Op(Box::new(TimedOp { at_us: step, op: Op::ResetPrefixes }))).expect("room");
        }
        drop(lines);
        let mut out = Vec::new();
        let error = write_all(&queue, &mut out, 100).expect_err("four lines are longer");
        assert!(error.to_string().contains("100 bytes"), "{error}");
        assert!(out.len() <= 100 && out.ends_with(b"\n") && out.len() > 20, "{}", String::from_utf8_lossy(&out));
    }
}
