//! The runs of one HTTP request: submitted together, their events as one stream.
//!
//! Guarantees: dropping it aborts what still runs; its blocks are free within a step.

use super::app::{App, Caller, UnderWayGuard};
use super::error::{ApiError, ApiResult};
use super::fleet::ModelUse;
use super::metrics::RunMeter;
use super::traces::RequestSpan;
use crate::engine::Run;
use crate::protocol::{EngineEvent, GenerateRequest, OutputRules, RunError};
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::watch;

/// One or several runs under way.
pub struct Generation {
    runs: Vec<(Run, RunMeter)>,
    /// The run to look at first, so that none waits behind a busy one.
    next: usize,
    out_of_time: watch::Receiver<bool>,
    /// Counts the request as under way, and gives its runs names to be aborted by.
    _guard: UnderWayGuard,
    /// The model stays loaded.
    _model: Arc<ModelUse>,
    span: Option<RequestSpan>,
}

impl Generation {
    /// Queues all requests, or none. `response_id` is one of the names by which the client may abort it.
    pub fn submit(
        app: &App,
        model: &Arc<ModelUse>,
        caller: &Caller,
        response_id: &str,
        requests: Vec<(GenerateRequest, OutputRules)>,
        prompt_field: &'static str,
    ) -> ApiResult<Generation> {
        let span = app.tracer.as_ref().map(|tracer| tracer.begin(caller, &model.name, &requests));
        let mut guard = app.admit(caller, &model.model)?;
        let mut runs = Vec::with_capacity(requests.len());
        for (request, rules) in requests {
            let meter = RunMeter::new(model.model.metrics.clone(), &request);
            match model.model.engine.submit_with(request, rules) {
                Ok(run) => runs.push((run, meter)),
                Err(error) => {
                    meter.refuse();
                    return Err(ApiError::of_run(&error, prompt_field));
                }
            }
        }
        let ids = runs.iter().map(|(run, _)| run.id()).collect();
        guard.name(caller, response_id, ids);
        let out_of_time = app.out_of_time();
        Ok(Generation { runs, next: 0, out_of_time, _guard: guard, _model: model.clone(), span })
    }

    /// The request of the first run in telemetry.
    pub fn first_id(&self) -> Option<u64> {
        self.runs.first().map(|(run, _)| run.id().0)
    }

    /// The next event of any run, with the run's index; `None` when all have ended. When the server has to end, the run
    /// that would be looked at next fails, which is the end of the answer.
    pub async fn recv(&mut self) -> Option<(usize, EngineEvent)> {
        let mut out_of_time = self.out_of_time.clone();
        tokio::select! {
            biased;
            event = std::future::poll_fn(|cx| self.poll_recv(cx)) => event,
            Ok(_) = out_of_time.wait_for(|is_out| *is_out) => {
                let event = EngineEvent::Failed { error: RunError::ShutDown };
                let i = self.next;
                self.observe(i, &event);
                Some((i, event))
            }
        }
    }

    fn observe(&mut self, i: usize, event: &EngineEvent) {
        self.runs[i].1.observe(event);
        if let Some(span) = &mut self.span {
            span.observe(event);
        }
    }

    /// An event that is there already.
    pub fn try_recv(&mut self) -> Option<(usize, EngineEvent)> {
        let mut cx = Context::from_waker(std::task::Waker::noop());
        match self.poll_recv(&mut cx) {
            Poll::Ready(event) => event,
            Poll::Pending => None,
        }
    }

    fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<(usize, EngineEvent)>> {
        let num_runs = self.runs.len();
        let mut is_over = true;
        for i in (0..num_runs).map(|i| (self.next + i) % num_runs) {
            match self.runs[i].0.poll_recv(cx) {
                Poll::Ready(Some(event)) => {
                    self.observe(i, &event);
                    self.next = (i + 1) % num_runs;
                    return Poll::Ready(Some((i, event)));
                }
                Poll::Ready(None) => {}
                Poll::Pending => is_over = false,
            }
        }
        if is_over { Poll::Ready(None) } else { Poll::Pending }
    }
}
