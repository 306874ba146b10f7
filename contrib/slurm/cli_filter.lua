-- Gives jobs with `--comment=flowgpu` what a preempted job needs. It lies beside slurm.conf.
--   --requeue             the same job is queued again
--   --open-mode=append    its output goes on in the same file
--   --signal=B:URG@60    the batch script is told a minute before the time limit, and at preemption
-- A job that names a signal has its own.

local NO_SIGNAL = { [""] = true, ["0@0"] = true, ["(null)"] = true }

function slurm_cli_setup_defaults(options, early)
    return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, pack_offset)
    if options["comment"] == "flowgpu" then
        options["requeue"] = "requeue"
        options["open-mode"] = "append"
        if NO_SIGNAL[options["signal"] or ""] then
            options["signal"] = "B:URG@60"
        end
    end
    return slurm.SUCCESS
end

function slurm_cli_post_submit(pack_offset, job_id, step_id)
    return slurm.SUCCESS
end
