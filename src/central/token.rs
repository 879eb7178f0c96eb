//! Buffers behind plain numbers: tokens, and what is kept for them.

use std::fmt;

use super::{CentralPool, Segment};

/// A buffer as three numbers, for passing it through code that knows only numbers. It is good once: whatever copy of
/// its numbers comes later is refused.
///
/// The first number says where the buffer is kept. The other two are a secret of 128 random bits, drawn from the system
/// for this token alone, in which nothing of the buffer, the pool or other tokens shows. So numbers that were made up
/// or altered are refused, and so is a token of another pool. But a token is the right to its buffer: code that learns
/// the numbers (from a log, a message, a shared table) can redeem it first. `Debug` leaves the secret out.
///
/// A refusal compares all of the secret, so the time that it takes does not tell how much of it was right. In the child
/// of a fork all tokens of the parent's pools are refused there, and what parent and child draw afterwards differs.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token {
    key: u64,
    secret: Secret,
}

impl Token {
    /// The token as numbers.
    #[must_use]
    pub fn to_raw(self) -> [u64; 3] {
        let Secret([first, second]) = self.secret;
        [self.key, first, second]
    }

    /// A token from numbers. Wrong ones are refused when it is redeemed.
    #[must_use]
    pub fn from_raw([key, first, second]: [u64; 3]) -> Self {
        Self { key, secret: Secret([first, second]) }
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("key", &self.key).finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Secret([u64; 2]);

impl Secret {
    /// Whether both are the same. Looks at all of them, whatever the first part says.
    fn is(self, Self(other): Self) -> bool {
        (self.0[0] ^ other[0]) | (self.0[1] ^ other[1]) == 0
    }
}

/// What is kept for a token.
pub(super) struct Deposit {
    secret: Secret,
    segment: Segment,
    written: usize,
}

impl fmt::Debug for Deposit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deposit").field("segment", &self.segment).finish_non_exhaustive()
    }
}

impl CentralPool {
    /// Keeps a segment with so many bytes written for the token that comes back.
    pub(crate) fn deposit(&self, segment: Segment, written: usize) -> Token {
        // Drawn before the lock: that is a system call.
        let secret = Secret(crate::os::random());
        // In the child of a fork the lock may be anyone's, and no token is redeemed.
        if crate::os::forked() {
            return Token { key: u64::MAX, secret };
        }
        let key = self.core.lock().tokens.insert(Deposit { secret, segment, written });
        Token { key: key as u64, secret }
    }

    /// What a token stands for, once.
    pub(crate) fn redeem(&self, token: Token) -> Option<(Segment, usize)> {
        let key = usize::try_from(token.key).ok()?;
        let mut core = self.core.lock();
        if !core.tokens.get(key)?.secret.is(token.secret) {
            return None;
        }
        let Deposit { segment, written, .. } = core.tokens.remove(key);
        Some((segment, written))
    }
}
