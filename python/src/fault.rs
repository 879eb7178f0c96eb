//! Errors as exceptions, whose classes are in `lib/pinpool/errors.py`.

use std::time::Duration;

use pinpool::{Error, ErrorClass, SubmitError};
use pyo3::prelude::*;

/// Why a call fails.
#[derive(Debug)]
pub(crate) enum Fault {
    /// An error of the crate, whose text the exception has.
    Crate(Error),
    /// A buffer that cannot do this now: the text says why, and what to do.
    State(&'static str),
    /// An exception that is there already, such as a signal's.
    Raised(PyErr),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Crate(error)
    }
}

impl<B> From<SubmitError<B>> for Fault {
    fn from(refused: SubmitError<B>) -> Self {
        Self::Crate(refused.error)
    }
}

impl From<PyErr> for Fault {
    fn from(error: PyErr) -> Self {
        Self::Raised(error)
    }
}

/// The exception's class.
fn class(error: &Error) -> &'static str {
    match error {
        Error::Timeout(_) => "TimeoutError",
        Error::Forked => "ForkedError",
        Error::Unavailable { .. } => "UnavailableError",
        Error::Unsupported(_) => "UnsupportedError",
        Error::Internal(_) => "InternalError",
        Error::Exhausted(_) | Error::MemLock { .. } | Error::OutOfMemory { .. } => "ExhaustedError",
        _ => match error.class() {
            ErrorClass::Argument => "ArgumentError",
            ErrorClass::Transient => "TransientError",
            ErrorClass::Capture => "CaptureError",
            ErrorClass::Closed => "ClosedError",
            ErrorClass::DeviceLost | ErrorClass::DriverShutdown => "DeviceLostError",
            _ => "Error",
        },
    }
}

impl From<Fault> for PyErr {
    fn from(fault: Fault) -> Self {
        let (class, text) = match fault {
            Fault::Crate(error) => (class(&error), error.to_string()),
            Fault::State(text) => ("StateError", text.to_owned()),
            Fault::Raised(error) => return error,
        };
        Python::attach(|py| {
            let made = py.import("pinpool.errors").and_then(|errors| errors.getattr(class)?.call1((text,)));
            made.map_or_else(|error| error, Self::from_value)
        })
    }
}

/// Refuses in the child of a fork what the crate itself would answer there.
pub(crate) fn check_fork() -> Result<(), Fault> {
    if pinpool::forked() { Err(Error::Forked.into()) } else { Ok(()) }
}

/// Seconds as Python has them.
pub(crate) fn seconds(given: f64) -> Result<Duration, Fault> {
    let refused =
        |_| Error::Argument(format!("a timeout of {given} seconds; give 0 or more, or None for no limit"));
    Ok(Duration::try_from_secs_f64(given).map_err(refused)?)
}
