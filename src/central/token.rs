//! Tokens: buffers as plain numbers, and what the central pool keeps for them.

use std::fmt;

use super::{CentralPool, Segment};

/// A buffer as three numbers, for passing it through code that knows only numbers. A token works once: after that the
/// pool refuses every copy of its numbers.
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build()?;
/// use pinpool::Token;
///
/// let mut buf = pool.checkout(5)?;
/// buf.extend_from_slice(b"hello");
/// let numbers: [u64; 3] = buf.into_token().to_raw();
///
/// let buf = pool.redeem(Token::from_raw(numbers))?;
/// assert_eq!(*buf, *b"hello");
/// assert!(pool.redeem(Token::from_raw(numbers)).is_err(), "a token works once");
/// # Ok::<(), pinpool::Error>(())
/// ```
///
/// The first number tells where the pool keeps the buffer. The other two are a secret of 128 random bits. The pool
/// draws it from the system for this token alone, and it shows nothing of the buffer, the pool or other tokens. So the
/// pool refuses numbers that were made up or altered, and tokens of other pools. But a token is the right to its
/// buffer: code that learns the numbers (from a log, a message, a shared table) can redeem it first. `Debug` leaves the
/// secret out.
///
/// A refusal compares the whole secret, so the time that it takes does not tell how much of it was right. In the child
/// of a fork, the parent's pools refuse all tokens. The secrets that parent and child draw afterwards differ.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token {
    key: u64,
    secret: Secret,
}

impl Token {
    /// The token as three numbers.
    #[must_use]
    pub fn to_raw(self) -> [u64; 3] {
        let Secret([first, second]) = self.secret;
        [self.key, first, second]
    }

    /// A token from three numbers. Wrong numbers are refused when the token is redeemed.
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
    /// Whether both are the same. Compares the second half also where the first differs.
    fn is(self, Self(other): Self) -> bool {
        (self.0[0] ^ other[0]) | (self.0[1] ^ other[1]) == 0
    }
}

/// What the central pool keeps for a token.
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
    /// Keeps a segment of which `written` bytes are written, and returns the token for it.
    pub(crate) fn deposit(&self, segment: Segment, written: usize) -> Token {
        // Before the lock, since drawing it is a system call.
        let secret = Secret(crate::os::random());
        // In the child of a fork a thread that no longer exists may hold the lock, and no token is redeemed.
        if crate::os::forked() {
            return Token { key: u64::MAX, secret };
        }
        let key = self.lock().books().tokens.insert(Deposit { secret, segment, written });
        Token { key: key as u64, secret }
    }

    /// Takes out what is kept for a token. `None`: the token is wrong, or was redeemed already.
    pub(crate) fn redeem(&self, token: Token) -> Option<(Segment, usize)> {
        let key = usize::try_from(token.key).ok()?;
        let mut core = self.lock();
        if !core.books.tokens.get(key)?.secret.is(token.secret) {
            return None;
        }
        let Deposit { segment, written, .. } = core.books().tokens.remove(key);
        Some((segment, written))
    }
}
